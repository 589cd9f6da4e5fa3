"""One training rank: the verbs that the driver calls, what each finds on the device, and the weights. Passes over a batch are step.py's."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moerl.algorithms.mini_batch_loss import Loss, ValueLossSettings
from moerl.models.hf_checkpoint import HFCheckpoint
from moerl.train.batching.micro_batch_plan import split_mini_batches
from moerl.train.checkpoint.checkpoint_dirs import FileDigests
from moerl.train.checkpoint.shard_store import ShardStore
from moerl.train.engine_settings import EngineSettings
from moerl.train.loss.loss_sums import step_statistics
from moerl.train.megatron.fp8_fields import require_device
from moerl.train.megatron.megatron_model import build_model
from moerl.train.megatron.overlap import gather_parameters
from moerl.train.megatron.process_groups import ReloadableGroups
from moerl.train.megatron.routing_stats import RoutingCounts
from moerl.train.megatron.value_head import load_head
from moerl.train.memory.device_report import begin_peaks, peaks, told_when_full
from moerl.train.memory.memory_states import ON_DEVICE, Call, MemoryStates, State
from moerl.train.memory.offload import DeviceMemory
from moerl.train.optimizer.optimizer import NoOptimizer, build_optimizer
from moerl.train.push.pushed_tensors import PushedTensors
from moerl.train.step import TrainStep
from moerl.types.batch import Batch
from moerl.types.stats import RoutingStats, StepStats


class MegatronEngine:
    def __init__(self, settings: EngineSettings, groups: ReloadableGroups | None = None):
        """Megatron's groups must exist. Loads the Hugging Face weights of `model_dir`, and keeps a copy of them as the reference.

        `groups`: Megatron's, if train.destroy_groups says that they end while the trainer sleeps. It starts awake.
        """
        self._settings, self._train = settings, settings.train
        require_device(settings.train.fp8)
        self.model = build_model(settings.model_dir, settings.train, max_context=settings.max_context, is_critic=settings.is_critic)
        with HFCheckpoint(settings.model_dir) as checkpoint:
            self.model.bridge.load(checkpoint)
            load_head(self.model.chunks, checkpoint)
        dtype = getattr(torch, settings.export_dtype)
        scales, layout, drafts = settings.push_fp8, self._train.layout, settings.pushes_mtp
        self.pushed = PushedTensors(self.model.bridge, layout, dtype, settings.model_dir, fp8_scales=scales, with_mtp=drafts)
        self.optimizer: Any = build_optimizer(settings.train, self.model.wrapped) if settings.trains else NoOptimizer()
        self.optimizer.reload_model_params()
        self.step = TrainStep(self.model, self.optimizer, settings)
        self.shards = ShardStore(self.model, self.optimizer, settings.train)
        self._reference = [tensor.detach().clone() for tensor in self.model.bridge.tensors()] if settings.uses_reference else None
        self._memory = DeviceMemory(self.model.wrapped, self.optimizer, self._reference)
        if not settings.trains:  # Megatron's wrapper makes buffers of gradients all the same
            self._memory.place(("parameters", "reference"))
        self._groups = groups
        self._memory_states = MemoryStates(self._train.offload, self._move, self._memory.bytes)

    # -- where its memory is ---------------------------------------------------------------------------------

    def wake(self) -> int:
        """Bytes that came to the device. Collective, as the next two. ResidencyError, as from every verb below, if it is not asleep."""
        return self._memory_states.wake()

    def shed(self) -> int:
        """Move of what scoring and export do not need: it leaves the device, until a verb needs it; bytes that left."""
        return self._memory_states.shed()

    def sleep(self) -> int:  # afterwards every verb but wake is refused
        return self._memory_states.sleep()

    def _move(self, before: State, after: State) -> None:
        if before == "asleep" and self._groups is not None:
            self._groups.make_again()
        self._memory.place(ON_DEVICE[self._train.offload][after])
        if after == "asleep" and self._groups is not None:
            self._groups.end()

    @contextmanager
    def _running(self, call: Call) -> Iterator[None]:
        with self._memory_states.running(call), told_when_full(call, self._memory.bytes, self._settings.model):
            yield

    # -- the two verbs of a step -----------------------------------------------------------------------------

    def logprobs(self, batch: Batch, *, records_routes: bool = False) -> np.ndarray:
        """float32 (float64 at dtype float64) [T] of the batch's sequences end to end: the log-prob of every token; the same on all ranks.

        In the micro-batches of the update to come, so that a policy that has not moved gives the update the very same numbers.
        `records_routes`: ranks keep where tokens went, for the update of this batch that comes next (train.router_replay=trainer).
        """
        with self._running("logprobs"):
            if not records_routes:
                return self.step.scores(batch, self.step.step_plan(batch))
            self.step.kept_routes.forget()
            parts = map(batch.select, split_mini_batches(batch.num_sequences, self._train.updates_per_step))
            return np.concatenate([self.step.scores(part, self.step.plan(part), records_routes=True) for part in parts])

    def reference_logprobs(self, batch: Batch) -> np.ndarray:
        """The same under the initial weights, swapped in for this pass."""
        assert self._reference is not None, "settings.uses_reference is False"
        with self._running("reference_logprobs"):
            gather_parameters(self.model.wrapped)
            self._swap_reference()
            try:
                # It is a model of its own, which routes by itself, and chooses from the whole vocabulary.
                return self.step.scores(batch.without_routes().without_sets(), self.step.step_plan(batch))
            finally:
                self._swap_reference()

    def values(self, batch: Batch) -> np.ndarray:
        """A critic's estimate of the rewards from every token on, likewise."""
        assert self.model.is_critic, "settings.is_critic is False"
        with self._running("values"):
            return self.step.scores(batch.without_routes().without_sets(), self.step.step_plan(batch))

    def update(self, batch: Batch, loss: Loss | ValueLossSettings, *, lr: float, num_updates: int) -> StepStats:
        """`num_updates` optimizer steps on consecutive mini-batches; the same statistics on all ranks, but those of its own memory."""
        with self._running("update"):
            return self._update(batch, loss, lr=lr, num_updates=num_updates)

    def _update(self, batch: Batch, loss: Loss | ValueLossSettings, *, lr: float, num_updates: int) -> StepStats:
        begin_peaks()
        self.model.routing.check(batch, self._train.router_replay)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            # Megatron marks norms and biases with wd_mult = 0, which only its scheduler (not used here) would read.
            group["weight_decay"] = self._train.optimizer.weight_decay * group.get("wd_mult", 1.0)
        first, *later = split_mini_batches(batch.num_sequences, num_updates)
        results = [self.step.mini_batch(batch.select(first), loss, samples=first)]
        if not results[0].refused:  # after an update the policy has moved: nothing is compared any more
            results += [self.step.mini_batch(batch.select(part).without_servers(), loss, samples=part) for part in later]
        applied = [result for result in results if result.trouble is None]
        balance = sum((result.balance for result in results[1:]), results[0].balance)
        counted = applied if applied else results  # without any update the statistics say why: they are not finite
        return StepStats(
            **step_statistics([result.sums for result in counted], uses_reference=loss.uses_reference, trains_mtp=self._train.mtp_loss > 0),
            grad_norm=max(result.grad_norm for result in counted),
            learning_rate=lr,
            memory=replace(self._memory_states.stats(), peaks=peaks()),
            server_mismatch=results[0].sums.server_mismatch(),
            empty_updates=sum(result.is_empty for result in results),
            whole_minibatch_seconds=sum(result.whole_minibatch_seconds for result in results),
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
        with self._running("export"):
            gather_parameters(self.model.wrapped)
            for name, tensor in self.model.bridge.export(getattr(torch, self._settings.export_dtype), with_mtp=with_mtp):
                # Not the parameter itself: the receiver may keep it, or see it as numpy, past the parameter's own stay.
                yield name, tensor.clone()

    @contextmanager
    def pushing(self, *, begins: bool = False) -> Iterator[None]:
        """`pushed` may be read inside. `begins`: collective, of the weights as they are now."""
        with self._running("export"):
            if begins:
                gather_parameters(self.model.wrapped)
                self.pushed.gather()
            yield

    def stage(self, *, copies: bool) -> int:
        """`ShardStore.stage`, with everything on the device."""
        with self._running("save"):
            gather_parameters(self.model.wrapped)
            return self.shards.stage(copies=copies)

    def load(self, directory: Path, files: FileDigests) -> list[str]:
        """`ShardStore.load`; of an engine that does not train, of the weights alone."""
        with self._running("load" if self._settings.trains else "export"):
            gather_parameters(self.model.wrapped)
            return self.shards.load(directory, files, weights_only=not self._settings.trains)

    # -- reference -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _swap_reference(self) -> None:
        """Exchange the contents of the parameters and of their copies; parameters stay where the optimizer put them."""
        assert self._reference is not None
        for parameter, kept in zip(self.model.bridge.tensors(), self._reference, strict=True):
            current = parameter.clone()
            parameter.copy_(kept)
            kept.copy_(current)


def _routing_stats(mini_batches: Sequence[RoutingCounts | None]) -> RoutingStats | None:
    counts = [counted for counted in mini_batches if counted is not None]
    return sum(counts[1:], counts[0]).stats() if counts else None
