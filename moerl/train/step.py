"""The passes of a training step on one rank: packed micro-batches through Megatron's forward-backward schedule.

Every rank gets the lengths of the whole batch and makes the same plan; it lays out, packs and runs the micro-batches of its data-parallel
rank alone.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from moerl.algorithms.mini_batch_loss import Loss, ValueLossSettings
from moerl.train.batching.micro_batch_plan import Balance, Bins, MicroBatchPlanner
from moerl.train.batching.packed_sequences import PackedMicroBatch, pack, unpack_scores
from moerl.train.batching.rank_share import Share
from moerl.train.batching.token_costs import attention_tokens
from moerl.train.engine_settings import EngineSettings
from moerl.train.loss.batch_loss import Denominators, LossColumns, micro_batch_loss
from moerl.train.loss.before_update import corrected, selected
from moerl.train.loss.logprobs import HeadInput, logprobs_and_entropy
from moerl.train.loss.loss_sums import LossSums
from moerl.train.loss.mtp_loss import MTPLoss
from moerl.train.loss.nonfinite import locate
from moerl.train.loss.value_loss import value_loss
from moerl.train.megatron.megatron_model import Model, sum_gradients
from moerl.train.megatron.overlap import without_grad_reduce
from moerl.train.megatron.router_replay import KeptRoutes
from moerl.train.megatron.routing_stats import RoutingCounts
from moerl.train.optimizer.optimizer import norm_known
from moerl.train.rank_progress import counted
from moerl.types.batch import Batch, TrainBatch
from moerl.types.kept_vocabulary import KeptVocabulary
from moerl.types.stats import disagreeing


class TrainStep:
    """Plan, micro-batches and passes of a batch; `plan`, `run` and `token_logprobs` are what the passes are made of."""

    def __init__(self, model: Model, optimizer: Any, settings: EngineSettings):
        self.model, self.optimizer = model, optimizer
        self.planner = MicroBatchPlanner.of(settings.train, attention_tokens(model.config, model.vocab_size))
        self.kept_routes = KeptRoutes()
        self._train, self._temperature = settings.train, settings.temperature
        self._mismatch_limit = settings.mismatch_limit

    def scores(self, batch: Batch, plan: Sequence[Bins], *, records_routes: bool = False) -> np.ndarray:
        """[T] of all of `batch`, of which this rank computes its share: log-probs, or a critic's values."""
        share = self.share(batch, plan)
        return self._scores(share, batch, self.micro_batches(share), records_routes=records_routes)

    def _scores(self, share: Share, batch: Batch, packed: list[PackedMicroBatch], *, records_routes: bool = False) -> np.ndarray:
        routing = self.model.routing
        with routing.run(packed, trains=False, notes=records_routes):
            outputs = self.run(packed, partial(_keep, _values if self.model.is_critic else self.token_logprobs), forward_only=True)
        routing.counts()
        if records_routes:
            self.kept_routes.keep(packed, routing.noted(packed))
        pieces = [(micro, out["scores_T"].numpy()) for micro, out in zip(packed, outputs, strict=True)] if outputs else []
        dtype = "float64" if self._train.dtype == "float64" else "float32"
        own_T = unpack_scores(pieces, share.batch, dtype=dtype)
        total_T = torch.from_numpy(share.spread(own_T, batch)).to(torch.cuda.current_device())
        reduce_over_micro_batches(total_T)
        return total_T.cpu().numpy()

    def mini_batch(self, batch: Batch, loss: Loss | ValueLossSettings, samples: np.ndarray) -> "MiniBatchResult":
        """One optimizer step, or none if loss or gradient is not finite, or a server's log-probs are not the model's. `samples`: where the
        sequences stand in the whole batch."""
        plan = self.plan(batch)
        began = time.perf_counter()
        share, denominators = self._before_update(batch, plan, loss)
        seconds = time.perf_counter() - began if "whole_minibatch" in loss.needs else 0.0
        packed = self._micro_batches_of_update(share)
        self.kept_routes.drop()
        for chunk in self.model.wrapped:
            chunk.zero_grad_buffer()  # type: ignore[operator]
        self.optimizer.zero_grad()
        loss_of_logits = self.loss(loss, denominators, self._mtp_loss(share.batch, batch))
        counts = torch.tensor(
            [sum(m.num_padding for m in packed), sum(m.num_positions for m in packed)], device=torch.cuda.current_device()
        )
        dist.all_reduce(counts, group=parallel_state.get_data_parallel_group())
        biases = self.model.routers.biases()
        self.model.routers.begin(num_tokens=int(counts[1] - counts[0]))
        with self.model.routing.run(packed, trains=True):
            outputs = self.run(packed, loss_of_logits, forward_only=False)
        routing = self.model.routing.counts()
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        # Only the last stage has outputs.
        zero = LossSums.zero(torch.device(torch.cuda.current_device()), batch.num_servers, loss.metric_names)
        total = sum((out["sums"] for out in outputs), zero)
        reduce_over_micro_batches(total.sums)
        reduce_over_micro_batches(total.mismatch_max, dist.ReduceOp.MAX)
        trouble, refused = None, bool(disagreeing(total.server_mismatch(), self._mismatch_limit))
        is_finite = math.isfinite(grad_norm) and math.isfinite(total.loss)
        is_empty = denominators.num_trained(loss) == 0
        applies = not refused and is_finite and not is_empty  # else momentum alone would move the weights
        if applies:
            with norm_known(self.optimizer, grad_norm):
                self.optimizer.step()
        elif not refused and not is_finite:
            trouble = self._locate_nonfinite(share, packed, loss_of_logits, samples)
        if not applies or not any(group["lr"] for group in self.optimizer.param_groups):  # while a critic learns alone
            self.model.routers.restore(biases)
        return MiniBatchResult(
            sums=total,
            grad_norm=grad_norm,
            num_padding=int(counts[0]),
            num_positions=int(counts[1]),
            balance=self.planner.balance(batch.lengths, plan),
            routing=routing,
            trouble=trouble,
            refused=refused,
            whole_minibatch_seconds=seconds,
            is_empty=is_empty,
        )

    def _before_update(self, batch: Batch, plan: Sequence[Bins], loss: Loss | ValueLossSettings) -> tuple[Share, Denominators]:
        """Sequences of this rank with what must be known of the whole mini-batch. Collective."""
        share = self.share(batch, plan)
        if isinstance(loss, ValueLossSettings):
            return share, Denominators.of(batch)
        own, denominators = corrected(share.batch, loss, Denominators.of(batch), reduce_over_shares)
        share = replace(share, batch=own)
        if "whole_minibatch" in loss.needs:
            logprobs_T = self._scores(share, batch, self._micro_batches_of_update(share))
            share = selected(share, batch, denominators, logprobs_T, loss, reduce_over_shares)
        return share, denominators

    def _micro_batches_of_update(self, share: Share) -> list[PackedMicroBatch]:
        """With the routes that it replays."""
        packed = self.micro_batches(share)
        return self.kept_routes.given(packed) if self._train.router_replay == "trainer" else packed

    def loss(self, loss: Loss | ValueLossSettings, denominators: Denominators, mtp: MTPLoss | None = None) -> Any:
        """Function of a micro-batch and the model's outputs that `run` takes for an update."""
        if isinstance(loss, ValueLossSettings):
            return partial(_value_loss, loss, denominators)
        return partial(_loss, partial(self.token_logprobs, entropy_has_gradient=loss.entropy_bonus > 0), loss, denominators, mtp)

    def _locate_nonfinite(self, share: Share, packed: Sequence[PackedMicroBatch], loss: Any, samples: np.ndarray) -> str:
        """Collective. Leaves the gradient buffers in disorder; the next mini-batch zeroes them."""
        self.model.config.finalize_model_grads_func = None
        try:
            with without_grad_reduce(self.model.wrapped):
                return locate(
                    run=lambda part: self._run_part(part, loss),
                    packed=[share.named(micro, samples) for micro in packed],
                    repack=share.repacking(lambda members: self.pack(share.batch, members), samples),
                    chunks=self.model.wrapped,
                    piece=self._train.layout.count_multiple,
                )
        finally:
            self.model.config.finalize_model_grads_func = sum_gradients

    def _run_part(self, packed: Sequence[PackedMicroBatch], loss: Any) -> list[dict[str, Any]]:
        """Sequences packed anew have no noted routes, and are routed as if nothing was replayed."""
        with self.model.routing.run(packed, trains=True):
            return self.run(packed, loss, forward_only=False)

    def plan(self, batch: Batch) -> list[Bins]:
        return self.planner.plan(batch.lengths)

    def step_plan(self, batch: Batch) -> list[Bins]:
        return self.planner.plan_step(batch.lengths, self._train.updates_per_step)

    def share(self, batch: Batch, plan: Sequence[Bins]) -> Share:
        return Share.of(batch, plan[parallel_state.get_data_parallel_rank()])

    def micro_batches(self, share: Share) -> list[PackedMicroBatch]:
        """Sequences of this rank: those of its data-parallel rank, of each the tokens of its context-parallel rank."""
        return [self.pack(share.batch, members) for members in share.bins]

    def pack(self, batch: TrainBatch, members: Sequence[int]) -> PackedMicroBatch:
        layout = self._train.layout
        whole = pack(batch, members, self._train.token_multiple, layout.sequence_multiple)
        return whole.part_of(parallel_state.get_context_parallel_rank(), layout.cp)

    def run(self, packed: Sequence[PackedMicroBatch], loss: Any, *, forward_only: bool) -> list[dict[str, Any]]:
        """Results that `loss` returned for each micro-batch, in order, on the last pipeline stage; nothing on the others."""
        # Multi-token prediction runs only where gradients are wanted.
        with torch.set_grad_enabled(not forward_only):
            return get_forward_backward_func()(
                forward_step_func=partial(_forward, loss, partial(self._routed, trains=not forward_only)),
                data_iterator=[counted(packed) for _ in self.model.wrapped],  # every chunk runs every micro-batch
                model=self.model.wrapped,
                num_microbatches=len(packed),
                seq_length=1,  # without effect: variable_seq_lengths
                micro_batch_size=1,
                forward_only=forward_only,
            )

    @contextmanager
    def _routed(self, micro: PackedMicroBatch, *, trains: bool) -> Iterator[None]:
        model = self.model
        with model.routers.micro_batch(micro, trains=trains), model.routing.micro_batch(micro, trains=trains):
            yield

    def token_logprobs(
        self, head: HeadInput, micro: PackedMicroBatch, *, entropy_has_gradient: bool = False, is_whole: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the labels that a loss asks about, and 0 of all others. `is_whole`: of the whole vocabulary, whatever
        they were chosen from."""
        return self._label_logprobs(
            head,
            micro.labels_T,
            micro.asked_T,
            temperature=self._temperature,
            entropy_has_gradient=entropy_has_gradient,
            sets=None if is_whole else micro.sets,
        )

    def _label_logprobs(
        self, head: HeadInput, labels_T: np.ndarray, asked_T: np.ndarray, *, sets: KeptVocabulary | None = None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        asked, device = np.flatnonzero(asked_T), head.hidden_TH.device
        rows = torch.from_numpy(asked).to(device)
        values = logprobs_and_entropy(
            replace(head, hidden_TH=head.hidden_TH.index_select(0, rows)),
            torch.from_numpy(labels_T[asked]).to(device),
            vocab_size=self.model.vocab_size,
            group=parallel_state.get_tensor_model_parallel_group(),
            chunk_tokens=self._train.logprob_chunk_tokens,
            sets=None if sets is None else sets.take(asked),
            **options,
        )
        logp_T, entropy_T = (each.new_zeros(len(asked_T)).scatter(0, rows, each) for each in values)
        return logp_T, entropy_T

    def _mtp_loss(self, own: TrainBatch, batch: Batch) -> MTPLoss | None:
        """That of a mini-batch, on a rank with the sequences `own`; None where multi-token prediction is not trained."""
        num_depths = self.model.config.mtp_num_layers
        if num_depths is None:
            return None
        # At temperature 1: draft heads learn the model's distribution, whatever it is sampled with.
        logprobs = partial(self._label_logprobs, temperature=1.0)
        counts = tuple(batch.num_responses_from(depth + 1) for depth in range(1, num_depths + 1))
        return MTPLoss(batch=own, counts=counts, coefficient=self._train.mtp_loss, logprobs=logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatchResult:
    sums: LossSums
    grad_norm: float
    num_padding: int
    num_positions: int
    balance: Balance
    routing: RoutingCounts | None
    trouble: str | None
    """Where loss or gradient was not finite; then nothing was updated."""
    refused: bool
    """Nothing was updated: a server sampled with other weights than it says."""
    is_empty: bool
    """Nothing was updated: corrections took all out, or nothing has a weight."""
    whole_minibatch_seconds: float
    """Time of the pass that the objective needs before the update."""


def reduce_over_micro_batches(values: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
    """In place: over data and context parallel ranks, and from the last pipeline stage (the others hold 0) to all."""
    dist.all_reduce(values, op=op, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    dist.all_reduce(values, op=op, group=parallel_state.get_pipeline_model_parallel_group())


def reduce_over_shares(values: Tensor) -> None:
    """Sum in place over the data-parallel ranks, which have different sequences; `values` on the CPU."""
    device = torch.device(torch.cuda.current_device())
    reduced = values.to(device)
    dist.all_reduce(reduced, group=parallel_state.get_data_parallel_group())
    if reduced is not values:
        values.copy_(reduced)


def _forward(loss: Any, routed: Any, iterator: Iterator[PackedMicroBatch], model: Any) -> tuple[Tensor, Any]:
    """Megatron's forward step: what the output layer makes logits of (of an earlier stage: hidden states), or a critic's values, and the
    function that makes it a loss."""
    micro = next(iterator)
    device = torch.cuda.current_device()
    bounds = torch.from_numpy(micro.cu_seqlens).to(device)
    sequences = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=micro.max_seqlen, max_seqlen_kv=micro.max_seqlen
    )
    tokens, positions = (torch.from_numpy(column).to(device)[None] for column in (micro.token_ids_T, micro.position_ids_T))
    with routed(micro):
        outputs = model(tokens, positions, None, packed_seq_params=sequences)
    return outputs, partial(loss, micro)


def _loss(
    token_logprobs: Any,
    loss_of_tokens: Loss,
    denominators: Denominators,
    mtp: MTPLoss | None,
    micro: PackedMicroBatch,
    outputs: tuple[HeadInput, ...],
) -> tuple[Tensor, Tensor, dict[str, LossSums]]:
    """`outputs` with multi-token prediction: the model's, then those of each depth."""
    head, *deeper = outputs
    logp_T, entropy_T = token_logprobs(head, micro)
    columns = LossColumns.of(micro, device=logp_T.device)
    is_compared = loss_of_tokens.uses_reference or columns.ce_weight_T is not None or columns.kl_weight_T is not None
    if micro.sets is not None and is_compared:
        # Reference, teacher and cross-entropy know the whole vocabulary: so must what is compared with them.
        columns = replace(columns, whole_logp_T=token_logprobs(head, micro, is_whole=True)[0])
    ranks = parallel_state.get_context_parallel_group() if parallel_state.get_context_parallel_world_size() > 1 else None
    loss, sums = micro_batch_loss(logp_T, entropy_T, columns, loss_of_tokens, denominators, ranks)
    if mtp is not None:
        mtp_loss = mtp.of(deeper, micro.label_index_T)
        loss, sums = loss + mtp.coefficient * mtp_loss, sums.with_mtp(mtp_loss)
    return loss, torch.zeros((), dtype=torch.int, device=logp_T.device), {"sums": sums}


def _value_loss(
    loss: ValueLossSettings, denominators: Denominators, micro: PackedMicroBatch, outputs: Tensor
) -> tuple[Tensor, Tensor, dict[str, LossSums]]:
    total, sums = value_loss(_values(outputs, micro)[0], micro, loss, denominators)
    return total, torch.zeros((), dtype=torch.int, device=outputs.device), {"sums": sums}


def _values(outputs: Tensor, _: PackedMicroBatch) -> tuple[Tensor, None]:
    return outputs[0, :, 0], None


def _keep(scores: Any, micro: PackedMicroBatch, outputs: Tensor | tuple[HeadInput, ...]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    scores_T, _ = scores(outputs if isinstance(outputs, Tensor) else outputs[0], micro)
    return scores_T.sum(), torch.zeros((), dtype=torch.int, device=scores_T.device), {"scores_T": scores_T.detach().cpu()}
