"""What routers do beside routing, off unless train.megatron asks for it: load-balancing losses and the update of the experts' biases.

Megatron adds the losses inside the model, per token of one rank, for a division by all tokens at the end. moerl scales every loss once and
divides nothing at the end, so the division goes into the coefficients, mini-batch by mini-batch.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from packaging.version import Version
from torch import Tensor, nn

from moerl.config.layout import Layout

_COEFFICIENTS = ("moe_aux_loss_coeff", "moe_z_loss_coeff")


class Routers:
    """Of this rank."""

    def __init__(self, config: TransformerConfig, chunks: Sequence[nn.Module], layout: Layout):
        self._config = config
        # A rank of a tensor or context parallel group has its share of the positions; Megatron 0.16 weighs its loss by that share again.
        self._shares = layout.tp * layout.cp if Version(version("megatron-core")) < Version("0.19") else 1
        self._tp = layout.tp
        self._biased = [m for chunk in chunks for m in chunk.modules() if isinstance(m, TopKRouter) and m.expert_bias is not None]
        self._counted: Tensor | None = None
        for router in self._biased:
            # Megatron counts padding as well, of which every layout has another amount; its own mask has the wrong shape (0.16.1, 0.19.2).
            router._apply_expert_bias = lambda *_, **__: None
            router.register_forward_hook(self._count)

    @contextmanager
    def mini_batch(self, num_positions: int) -> Iterator[None]:
        """Inside, the losses of micro-batches add up to their mean, weighted by positions. `num_positions`: of all ranks."""
        given = {name: getattr(self._config, name) for name in _COEFFICIENTS}
        for name, value in given.items():
            if value is not None:
                setattr(self._config, name, value * self._shares / num_positions)
        try:
            yield
        finally:
            for name, value in given.items():
                setattr(self._config, name, value)

    @contextmanager
    def counting(self, is_token_T: np.ndarray, *, trains: bool) -> Iterator[None]:
        """Inside, tokens are counted for the biases. A layer that is computed again for its backward pass runs outside, and counts once.

        `is_token_T`: bool [T] of this context-parallel rank, True where a token of a sequence stands.
        """
        if trains and self._config.moe_router_bias_update_rate > 0:
            mine = np.split(is_token_T, self._tp)[parallel_state.get_tensor_model_parallel_rank()]  # sequence parallel
            self._counted = torch.from_numpy(mine).to(torch.cuda.current_device())
        try:
            yield
        finally:
            self._counted = None

    @torch.no_grad()
    def _count(self, router: Any, _: object, output: tuple[Tensor, Tensor]) -> None:
        if self._counted is not None:
            router.local_tokens_per_expert += output[1][self._counted].sum(dim=0)

    def biases(self) -> list[Tensor]:
        """Copies, for `restore`."""
        return [router.expert_bias.clone() for router in self._biased]

    @torch.no_grad()
    def restore(self, biases: Sequence[Tensor]) -> None:
        """Put back biases that Megatron updated before anybody looked at the gradient, and forget the tokens counted since."""
        for router, bias in zip(self._biased, biases, strict=True):
            router.expert_bias.copy_(bias)
            router.local_tokens_per_expert.zero_()
