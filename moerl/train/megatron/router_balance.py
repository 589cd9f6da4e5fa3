"""Duties of routers beside routing, off unless train.megatron asks for it: load-balancing losses and the update of the experts' biases.

Both are of tokens alone, whatever padding the layout, its cut into micro-batches or FP8 add. Megatron counts padding too: its own mask has
the wrong shape for the biases (0.16.1, 0.19.2), weighs the ranks that share a micro-batch by the tokens each happens to hold, and divides
by 0 for a micro-batch of padding. So the losses are computed here, in place of Megatron's, with a loss's one scale: over the tokens of the
mini-batch, and nothing is divided at the end.

* z loss (ST-MoE, arXiv:2202.08906, equation 5): the mean over tokens of the squared log of the sum of the logits' exponentials.
* aux loss (Switch Transformers, arXiv:2101.03961, equation 4): of each micro-batch, and the mean of these, weighted by their tokens.

Invariants, by the names of their tests:
* without_padding: gradients are those of these sentences in plain PyTorch, under every layout.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from moerl.config.schema.layout import Layout
from moerl.train.batching.packed_sequences import PackedMicroBatch
from moerl.train.loss.batch_loss import at_least_float32
from moerl.types.errors import TrainError


@dataclass(frozen=True, slots=True, kw_only=True)
class _MicroBatch:
    """A micro-batch in a forward pass through one chunk."""

    is_token_T: Tensor  # bool, of this rank's positions: False for padding
    count: int
    """Tokens on all ranks that share the micro-batch."""
    trains: bool


class RouterBalance:
    """RouterBalance of this rank."""

    def __init__(self, config: TransformerConfig, chunks: Sequence[nn.Module], layout: Layout):
        self._tp = layout.tp
        routers = [m for chunk in chunks for m in chunk.modules() if isinstance(m, TopKRouter)]
        self._biased = [router for router in routers if router.expert_bias is not None]
        self._losses = [_Losses(self, router) for router in routers if router.is_aux_loss_enabled() or config.moe_z_loss_coeff]
        self.running: _MicroBatch | None = None
        self.num_tokens = 1
        self._counts = bool(self._biased) and config.moe_router_bias_update_rate > 0
        for router in self._biased:
            router._apply_expert_bias = lambda *_, **__: None
            if self._counts:
                router.register_forward_hook(self._count)

    def begin(self, *, num_tokens: int) -> None:
        """A mini-batch of so many tokens, over all ranks."""
        self.num_tokens = num_tokens
        for losses in self._losses:
            losses.forget()

    @contextmanager
    def micro_batch(self, micro: PackedMicroBatch, *, trains: bool) -> Iterator[None]:
        """Inside, `micro` makes its forward pass through one chunk. A layer that is computed again for its backward pass runs outside:
        its tokens are counted once for the biases, and its losses are those of the pass it repeats."""
        if self._losses or self._counts:
            mine = np.split(micro.is_token_T, self._tp)[parallel_state.get_tensor_model_parallel_rank()]  # sequence parallel
            is_token_T = torch.from_numpy(mine).to(torch.cuda.current_device())
            self.running = _MicroBatch(is_token_T=is_token_T, count=micro.num_positions - micro.num_padding, trains=trains)
        try:
            yield
        finally:
            self.running = None

    @torch.no_grad()
    def _count(self, router: Any, _: object, output: tuple[Tensor, Tensor]) -> None:
        if self.running is not None and self.running.trains:
            router.local_tokens_per_expert += output[1][self.running.is_token_T].sum(dim=0)

    def biases(self) -> list[Tensor]:
        """Copies, for `restore`."""
        return [router.expert_bias.clone() for router in self._biased]

    @torch.no_grad()
    def restore(self, biases: Sequence[Tensor]) -> None:
        """Put back biases that Megatron updated before anybody looked at the gradient, and forget the tokens counted since."""
        for router, bias in zip(self._biased, biases, strict=True):
            router.expert_bias.copy_(bias)
            router.local_tokens_per_expert.zero_()


class _Losses:
    """The load-balancing losses of one router, in place of Megatron's. Ranks that share a micro-batch add up to its loss."""

    def __init__(self, routers: RouterBalance, router: Any):
        self._routers, self._router = routers, router
        self._tokens: _MicroBatch | None = None
        self._again: deque[_MicroBatch] = deque()
        router.register_forward_pre_hook(self._enter)
        router.apply_z_loss = self._with_z_loss
        router._apply_aux_loss = self._with_aux_loss

    def forget(self) -> None:
        self._again.clear()  # of a run that failed

    def _enter(self, *_: object) -> None:
        """Which micro-batch runs: schedules run the backward passes of a chunk in the order of its forward passes."""
        running = self._routers.running
        if running is not None:
            self._tokens = running
            if running.trains and not torch.is_grad_enabled():
                self._again.append(running)
        elif torch.is_grad_enabled():
            if not self._again:
                raise TrainError("load-balancing losses: a layer was computed again more often than it ran, so its tokens are not known")
            self._tokens = self._again.popleft()

    def _with_z_loss(self, logits_TE: Tensor, padding_mask: object = None) -> Tensor:
        coefficient = self._router.config.moe_z_loss_coeff
        if not coefficient or not torch.is_grad_enabled():
            return logits_TE
        tokens = self._known()
        squares_T = at_least_float32(logits_TE).logsumexp(-1).square()
        loss = torch.where(tokens.is_token_T, squares_T, 0.0).sum() * (coefficient / self._routers.num_tokens)
        return MoEAuxLossAutoScaler.apply(logits_TE, loss)

    def _with_aux_loss(self, probs: Tensor, scores_TE: Tensor, routing_map_TE: Tensor, with_padding_mask: bool = False) -> Tensor:
        """Experts * the sum over them of (share of the choices that fell on the expert) * (mean of its scores); see equation 4."""
        tokens, router = self._known(), self._router
        if tokens.count == 0:
            return probs
        load_E = (routing_map_TE & tokens.is_token_T[:, None]).sum(0)
        dist.all_reduce(load_E, group=router.tp_cp_group)
        score_E = torch.where(tokens.is_token_T[:, None], at_least_float32(scores_TE), 0.0).sum(0)
        scale = router.get_aux_loss_coeff("aux_loss") * len(load_E) / (router.topk * tokens.count * self._routers.num_tokens)
        return MoEAuxLossAutoScaler.apply(probs, (load_E * score_E).sum() * scale)

    def _known(self) -> _MicroBatch:
        assert self._tokens is not None, "a forward pass with gradient outside of an update"
        return self._tokens
