"""One training rank: log-probs and updates of packed micro-batches through Megatron's forward-backward schedule.

Every rank gets the lengths of the whole batch and makes the same plan; it lays out, packs and runs the micro-batches of its data-parallel
rank alone.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from moerl.algorithms.objective import Objective
from moerl.models.hf_checkpoint import HFCheckpoint
from moerl.train.batching.balance import Balance, Bins, Planner, split_mini_batches
from moerl.train.batching.packing import PackedMicroBatch, pack, unpack_logprobs
from moerl.train.batching.rank_share import Share
from moerl.train.batching.token_costs import attention_tokens
from moerl.train.checkpoint.shard_store import ShardStore
from moerl.train.engine_settings import EngineSettings
from moerl.train.loss.batch_loss import Denominators, LossColumns, LossSums, micro_batch_loss, step_statistics
from moerl.train.loss.logprobs import logprobs_and_entropy
from moerl.train.loss.mtp_loss import MTPLoss, MTPTargets
from moerl.train.loss.nonfinite import locate
from moerl.train.megatron.fp8_fields import require_device
from moerl.train.megatron.kept_routes import KeptRoutes
from moerl.train.megatron.megatron_model import build_model, sum_gradients
from moerl.train.megatron.optimizer import NoOptimizer, build_optimizer
from moerl.train.megatron.overlap import gather_parameters, without_grad_reduce
from moerl.train.megatron.reloadable_groups import ReloadableGroups
from moerl.train.megatron.routing_stats import RoutingCounts
from moerl.train.memory.memory_states import ON_DEVICE, MemoryStates, State
from moerl.train.memory.offload import DeviceMemory, largest_over_ranks
from moerl.train.push.rank_tensors import PushedTensors
from moerl.train.rank_progress import counted
from moerl.types.batch import TrainBatch
from moerl.types.stats import RoutingStats, StepStats
from moerl.types.stored_batch import Batch


class MegatronEngine:
    def __init__(self, settings: EngineSettings, groups: ReloadableGroups | None = None):
        """Megatron's groups must exist. Loads the Hugging Face weights of `model_dir`, and keeps a copy of them as the reference.

        `groups`: Megatron's, if train.destroy_groups says that they end while the trainer sleeps. It starts awake.
        """
        self._settings, self._train = settings, settings.train
        require_device(settings.train.fp8)
        self.model = build_model(settings.model_dir, settings.train, max_context=settings.max_context)
        with HFCheckpoint(settings.model_dir) as checkpoint:
            self.model.bridge.load(checkpoint)
        dtype = getattr(torch, settings.export_dtype)
        self.pushed = PushedTensors(self.model.bridge, self._train.layout, dtype, settings.model_dir, in_fp8=settings.push_fp8)
        self.planner = Planner.of(settings.train, attention_tokens(self.model.config, self.model.vocab_size))
        self.optimizer: Any = build_optimizer(settings.train, self.model.wrapped) if settings.trains else NoOptimizer()
        self.optimizer.reload_model_params()
        self.shards = ShardStore(self.model, self.optimizer, settings.train)
        self._reference = [tensor.detach().clone() for tensor in self.model.bridge.tensors()] if settings.uses_reference else None
        self._kept_routes = KeptRoutes()
        self._memory = DeviceMemory(self.model.wrapped, self.optimizer, self._reference)
        self._groups = groups
        self._residency = MemoryStates(self._train.offload, self._move, self._memory.bytes)

    # -- where its memory is ---------------------------------------------------------------------------------

    def wake(self) -> int:
        """Bytes that came to the device. Collective, as the next two. ResidencyError, as from every verb below, if it is not asleep."""
        return self._residency.wake()

    def shed(self) -> int:
        """Move of what scoring and export do not need: it leaves the device, until a verb needs it; bytes that left."""
        return self._residency.shed()

    def sleep(self) -> int:  # afterwards every verb but wake is refused
        return self._residency.sleep()

    def _move(self, before: State, after: State) -> None:
        if before == "asleep" and self._groups is not None:
            self._groups.make_again()
        self._memory.place(ON_DEVICE[self._train.offload][after])
        if after == "asleep" and self._groups is not None:
            self._groups.end()

    # -- the two verbs of a step -----------------------------------------------------------------------------

    def logprobs(self, batch: Batch, *, records_routes: bool = False) -> np.ndarray:
        """float32 (float64 at dtype float64) [T] of the batch's sequences end to end: the log-prob of every token; the same on all ranks.

        In the micro-batches of the update to come, so that a policy that has not moved gives the update the very same numbers.
        `records_routes`: ranks keep where tokens went, for the update of this batch that comes next (train.router_replay=trainer).
        """
        with self._residency.running("logprobs"):
            if not records_routes:
                return self._logprobs(batch, self._step_plan(batch))
            self._kept_routes.forget()
            parts = map(batch.select, split_mini_batches(batch.num_sequences, self._train.updates_per_step))
            return np.concatenate([self._logprobs(part, self._plan(part), records_routes=True) for part in parts])

    def reference_logprobs(self, batch: Batch) -> np.ndarray:
        """The same under the initial weights, swapped in for this pass."""
        assert self._reference is not None, "settings.uses_reference is False"
        with self._residency.running("reference_logprobs"):
            gather_parameters(self.model.wrapped)
            self._swap_reference()
            try:
                return self._logprobs(batch.without_routes(), self._step_plan(batch))  # it is a model of its own, which routes by itself
            finally:
                self._swap_reference()

    def _logprobs(self, batch: Batch, plan: Sequence[Bins], *, records_routes: bool = False) -> np.ndarray:
        share, routing = self._share(batch, plan), self.model.routing
        packed = self._micro_batches(share)
        with routing.run(packed, trains=False, notes=records_routes):
            outputs = self._run(packed, partial(_keep_logprobs, self._token_logprobs), forward_only=True)
        routing.counts()
        if records_routes:
            self._kept_routes.keep(packed, routing.noted(packed))
        pieces = [(micro, out["logprobs_T"].numpy()) for micro, out in zip(packed, outputs, strict=True)] if outputs else []
        dtype = "float64" if self._train.dtype == "float64" else "float32"
        own_T = unpack_logprobs(pieces, share.batch, dtype=dtype)
        total_T = torch.from_numpy(share.spread(own_T, batch)).to(torch.cuda.current_device())
        _reduce_over_micro_batches(total_T)
        return total_T.cpu().numpy()

    def update(self, batch: Batch, objective: Objective, *, lr: float, num_updates: int) -> StepStats:
        """`num_updates` optimizer steps on consecutive mini-batches; the same statistics on all ranks."""
        with self._residency.running("update"):
            return self._update(batch, objective, lr=lr, num_updates=num_updates)

    def _update(self, batch: Batch, objective: Objective, *, lr: float, num_updates: int) -> StepStats:
        self.model.routing.check(batch, self._train.router_replay)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            # Megatron marks norms and biases with wd_mult = 0, which only its scheduler (not used here) would read.
            group["weight_decay"] = self._train.optimizer.weight_decay * group.get("wd_mult", 1.0)
        parts = split_mini_batches(batch.num_sequences, num_updates)
        results = [self._mini_batch(batch.select(part), objective, samples=part) for part in parts]
        applied = [result for result in results if result.trouble is None]
        balance = sum((result.balance for result in results[1:]), results[0].balance)
        counted = applied if applied else results  # without any update the statistics say why: they are not finite
        return StepStats(
            **step_statistics(  # type: ignore[arg-type]
                [result.sums for result in counted], uses_reference=objective.uses_reference, trains_mtp=self._train.mtp_loss > 0
            ),
            grad_norm=max(result.grad_norm for result in counted),
            learning_rate=lr,
            memory=largest_over_ranks(self._residency.stats()),
            skipped_updates=tuple(result.trouble for result in results if result.trouble is not None),
            padding_fraction=sum(r.num_padding for r in results) / sum(r.num_positions for r in results),
            rank_imbalance=balance.rank_imbalance,
            round_imbalance=balance.round_imbalance,
            routing=_routing_stats([result.routing for result in counted]),
        )

    # -- weights ---------------------------------------------------------------------------------------------

    def export(self, *, with_mtp: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Collective: (Hugging Face name, whole tensor) on rank 0, nothing on the others. `with_mtp` False: what a server holds.

        No other call may begin before it has ended.
        """
        with self._residency.running("export"):
            gather_parameters(self.model.wrapped)
            for name, tensor in self.model.bridge.export(getattr(torch, self._settings.export_dtype), with_mtp=with_mtp):
                # Not the parameter itself: the receiver may keep it, or see it as numpy, past the parameter's own stay.
                yield name, tensor.clone()

    @contextmanager
    def pushing(self, *, begins: bool = False) -> Iterator[None]:
        """`pushed` may be read inside. `begins`: collective, of the weights as they are now."""
        with self._residency.running("export"):
            if begins:
                gather_parameters(self.model.wrapped)
                self.pushed.gather()
            yield

    def stage(self, *, copies: bool) -> int:
        """`ShardStore.stage`, with everything on the device."""
        with self._residency.running("save"):
            gather_parameters(self.model.wrapped)
            return self.shards.stage(copies=copies)

    def load(self, directory: Path) -> None:
        with self._residency.running("load" if self._settings.trains else "export"):
            gather_parameters(self.model.wrapped)
            self.shards.load(directory, weights_only=not self._settings.trains)

    # -- one mini-batch --------------------------------------------------------------------------------------

    def _mini_batch(self, batch: Batch, objective: Objective, samples: np.ndarray) -> "_MiniBatchResult":
        """One optimizer step, or none if loss or gradient is not finite. `samples`: where the sequences stand in the whole batch."""
        plan = self._plan(batch)
        share = self._share(batch, plan)
        packed = self._micro_batches(share)
        if self._train.router_replay == "trainer":
            packed = self._kept_routes.take(packed)
        for chunk in self.model.wrapped:
            chunk.zero_grad_buffer()  # type: ignore[operator]
        self.optimizer.zero_grad()
        loss = partial(_loss, self._token_logprobs, objective, Denominators.of(batch), self._mtp_loss(share.batch, batch))
        counts = torch.tensor(
            [sum(m.num_padding for m in packed), sum(m.num_positions for m in packed)], device=torch.cuda.current_device()
        )
        dist.all_reduce(counts, group=parallel_state.get_data_parallel_group())
        biases = self.model.routers.biases()
        self.model.routers.begin(num_tokens=int(counts[1] - counts[0]))
        with self.model.routing.run(packed, trains=True):
            outputs = self._run(packed, loss, forward_only=False)
        routing = self.model.routing.counts()
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        # Only the last stage has outputs.
        total = sum((out["sums"] for out in outputs), LossSums.zero(torch.device(torch.cuda.current_device())))
        _reduce_over_micro_batches(total.sums)
        _reduce_over_micro_batches(total.mismatch_max, dist.ReduceOp.MAX)
        trouble = None
        if math.isfinite(grad_norm) and math.isfinite(total.loss):
            self.optimizer.step()
        else:
            trouble = self._locate_nonfinite(share, packed, loss, samples)
            self.model.routers.restore(biases)
        return _MiniBatchResult(
            sums=total,
            grad_norm=grad_norm,
            num_padding=int(counts[0]),
            num_positions=int(counts[1]),
            balance=self.planner.balance(batch.lengths, plan),
            routing=routing,
            trouble=trouble,
        )

    def _locate_nonfinite(self, share: Share, packed: Sequence[PackedMicroBatch], loss: Any, samples: np.ndarray) -> str:
        """Collective. Leaves the gradient buffers in disorder; the next mini-batch zeroes them."""
        self.model.config.finalize_model_grads_func = None
        try:
            with without_grad_reduce(self.model.wrapped):
                return locate(
                    run=lambda part: self._run_part(part, loss),
                    packed=[share.named(micro, samples) for micro in packed],
                    repack=share.repacking(lambda members: self._pack(share.batch, members), samples),
                    chunks=self.model.wrapped,
                    piece=self._train.layout.count_multiple,
                )
        finally:
            self.model.config.finalize_model_grads_func = sum_gradients

    def _run_part(self, packed: Sequence[PackedMicroBatch], loss: Any) -> list[dict[str, Any]]:
        """Sequences packed anew have no noted routes, and are routed as if nothing was replayed."""
        with self.model.routing.run(packed, trains=True):
            return self._run(packed, loss, forward_only=False)

    def _plan(self, batch: Batch) -> list[Bins]:
        return self.planner.plan(batch.lengths)

    def _step_plan(self, batch: Batch) -> list[Bins]:
        return self.planner.plan_step(batch.lengths, self._train.updates_per_step)

    def _share(self, batch: Batch, plan: Sequence[Bins]) -> Share:
        return Share.of(batch, plan[parallel_state.get_data_parallel_rank()])

    def _micro_batches(self, share: Share) -> list[PackedMicroBatch]:
        """Sequences of this rank: those of its data-parallel rank, of each the tokens of its context-parallel rank."""
        return [self._pack(share.batch, members) for members in share.bins]

    def _pack(self, batch: TrainBatch, members: Sequence[int]) -> PackedMicroBatch:
        layout = self._train.layout
        whole = pack(batch, members, self._train.token_multiple, layout.sequence_multiple)
        return whole.part_of(parallel_state.get_context_parallel_rank(), layout.cp)

    def _run(self, packed: Sequence[PackedMicroBatch], loss: Any, *, forward_only: bool) -> list[dict[str, Any]]:
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

    def _token_logprobs(self, logits: Tensor, micro: PackedMicroBatch) -> tuple[Tensor, Tensor]:
        return self._label_logprobs(logits, micro.labels_T, temperature=self._settings.temperature)

    def _label_logprobs(self, logits: Tensor, labels_T: np.ndarray, *, temperature: float) -> tuple[Tensor, Tensor]:
        return logprobs_and_entropy(
            logits[0],
            torch.from_numpy(labels_T).to(logits.device),
            temperature=temperature,
            vocab_size=self.model.vocab_size,
            group=parallel_state.get_tensor_model_parallel_group(),
            chunk_tokens=self._train.logprob_chunk_tokens,
        )

    def _mtp_loss(self, own: TrainBatch, batch: Batch) -> "MTPLoss | None":
        """Targets of a mini-batch, on a rank with the sequences `own`; None where multi-token prediction is not trained."""
        num_depths = self.model.config.mtp_num_layers
        if num_depths is None:
            return None
        # At temperature 1: draft heads learn the model's distribution, whatever it is sampled with.
        logprobs = partial(self._label_logprobs, temperature=1.0)
        return MTPLoss(targets=MTPTargets.of(own, num_depths, whole=batch), coefficient=self._train.mtp_loss, logprobs=logprobs)

    # -- reference -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _swap_reference(self) -> None:
        """Exchange the contents of the parameters and of their copies; parameters stay where the optimizer put them."""
        assert self._reference is not None
        for parameter, kept in zip(self.model.bridge.tensors(), self._reference, strict=True):
            current = parameter.clone()
            parameter.copy_(kept)
            kept.copy_(current)


@dataclass(frozen=True, slots=True, kw_only=True)
class _MiniBatchResult:
    sums: LossSums
    grad_norm: float
    num_padding: int
    num_positions: int
    balance: Balance
    routing: RoutingCounts | None
    trouble: str | None
    """Where loss or gradient was not finite; then nothing was updated."""


def _reduce_over_micro_batches(values: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
    """In place: over data and context parallel ranks, and from the last pipeline stage (the others hold 0) to all."""
    dist.all_reduce(values, op=op, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    dist.all_reduce(values, op=op, group=parallel_state.get_pipeline_model_parallel_group())


def _routing_stats(mini_batches: Sequence[RoutingCounts | None]) -> RoutingStats | None:
    counts = [counted for counted in mini_batches if counted is not None]
    return sum(counts[1:], counts[0]).stats() if counts else None


def _forward(loss: Any, routed: Any, iterator: Iterator[PackedMicroBatch], model: Any) -> tuple[Tensor, Any]:
    """Megatron's forward step: logits [1, T, V / tp] (of an earlier stage: hidden states) and the function that makes them a loss."""
    micro = next(iterator)
    device = torch.cuda.current_device()
    bounds = torch.from_numpy(micro.cu_seqlens).to(device)
    sequences = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=micro.max_seqlen, max_seqlen_kv=micro.max_seqlen
    )
    tokens, positions = (torch.from_numpy(column).to(device)[None] for column in (micro.token_ids_T, micro.position_ids_T))
    with routed(micro):
        logits = model(tokens, positions, None, packed_seq_params=sequences)
    return logits, partial(loss, micro)


def _loss(
    token_logprobs: Any,
    objective: Objective,
    denominators: Denominators,
    mtp: MTPLoss | None,
    micro: PackedMicroBatch,
    outputs: Tensor | tuple[Tensor, ...],
) -> tuple[Tensor, Tensor, dict[str, LossSums]]:
    """`outputs` with multi-token prediction: the logits, then those of each depth."""
    logits, *deeper = outputs if isinstance(outputs, tuple) else (outputs,)
    logp_T, entropy_T = token_logprobs(logits, micro)
    columns = LossColumns.of(micro, device=logits.device)
    loss, sums = micro_batch_loss(logp_T, entropy_T, columns, objective, denominators)
    if mtp is not None:
        mtp_loss = mtp.of(deeper, micro.label_index_T)
        loss, sums = loss + mtp.coefficient * mtp_loss, sums.with_mtp(mtp_loss)
    return loss, torch.zeros((), dtype=torch.int, device=logits.device), {"sums": sums}


def _keep_logprobs(token_logprobs: Any, micro: PackedMicroBatch, logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    logp_T, _ = token_logprobs(logits, micro)
    return logp_T.sum(), torch.zeros((), dtype=torch.int, device=logits.device), {"logprobs_T": logp_T.detach().cpu()}
