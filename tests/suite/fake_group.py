"""A trainer without a model: it counts versions, answers uniform log-probs, and pushes tensors whose values are the version.

For tests of everything around the trainer; checkpoints hold the driver's state only.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from local_source import LocalSource

from moerl.algorithms.mini_batch_loss import Loss
from moerl.hangs.watched import WatchedProcess
from moerl.train.checkpoint import checkpoint_dirs
from moerl.train.checkpoint.checkpoint_check import read_state
from moerl.train.memory.memory_states import MemoryStates
from moerl.types.batch import Batch, TrainBatch
from moerl.types.push import TensorSpec
from moerl.types.stats import SavedCheckpoint, ServerMismatch, StepStats, disagreeing
from moerl.types.stored import Here, Stored


class FakeTrainGroup:
    def __init__(
        self, *, vocab_size: int, tensors: tuple[TensorSpec, ...], checkpoint_dir: Path, keep: int = 2, mismatch_limit: float = math.inf
    ):
        self._mismatch_limit = mismatch_limit
        self._logprob = -float(np.log(vocab_size))
        self._tensors, self._checkpoint_dir, self._keep = tensors, checkpoint_dir, keep
        self.weight_source = LocalSource(self._export, bucket_bytes=2**20)
        self._memory_states = MemoryStates("none", move=lambda before, after: None, measure=dict)
        self.version = 0
        self.batches: list[TrainBatch] = []
        self._saved: list[SavedCheckpoint] = []

    async def start(self) -> None: ...

    async def wake(self) -> int:
        return self._memory_states.wake()

    async def shed(self) -> int:
        return self._memory_states.shed()

    async def sleep(self) -> int:
        return self._memory_states.sleep()

    async def load(self) -> tuple[int, dict[str, Any]]:
        directory = checkpoint_dirs.newest(self._checkpoint_dir)
        if directory is None:
            return 0, {}
        with self._memory_states.running("load"):
            state = read_state(directory)
            self.version = state["version"]
        return self.version, state

    async def save(self, version: int, state: Mapping[str, Any]) -> None:
        with self._memory_states.running("save"):
            weights = self.version
        self._write(version, weights, state)

    def _write(self, version: int, weights: int, state: Mapping[str, Any]) -> None:
        temporary = checkpoint_dirs.begin(self._checkpoint_dir, version)
        (temporary / "weights.json").write_text(json.dumps(weights))
        files = checkpoint_dirs.digest_files(temporary, ["weights.json"])
        checkpoint_dirs.commit(temporary, files, {"version": version, **state}, {}, keep=self._keep)
        self._saved.append(SavedCheckpoint(version=version, num_bytes=0, seconds=0.0, blocked_seconds=0.0))

    async def saved(self, *, wait: bool = False) -> list[SavedCheckpoint]:
        saved, self._saved = self._saved, []
        return saved

    async def logprobs(self, batch: Batch, *, records_routes: bool = False) -> Stored[np.ndarray]:
        with self._memory_states.running("logprobs"):
            return Here(np.full(int(batch.offsets[-1]), self._logprob, dtype=np.float32))

    async def reference_logprobs(self, batch: Batch) -> Stored[np.ndarray]:
        return await self.logprobs(batch)

    async def update(self, batch: Batch, loss: Loss, *, lr: float) -> StepStats:
        with self._memory_states.running("update"):
            whole = batch.laid_out(np.arange(batch.num_sequences))
            self.batches.append(whole)
            servers = self._server_mismatch(whole)
            self.version += not disagreeing(servers, self._mismatch_limit)
        mismatch_T = np.abs(self._logprob - whole.rollout_logprobs_T[whole.response_mask_T])
        return StepStats(
            loss=0.0, grad_norm=0.0, learning_rate=lr, num_tokens=int(whole.response_mask_T.sum()), entropy=-self._logprob, kl_old=0.0,
            kl_reference=None, clip_fraction=0.0, mismatch_mean=float(mismatch_T.mean()), mismatch_max=float(mismatch_T.max()),
            mismatch_kl=0.0, padding_fraction=0.0, rank_imbalance=1.0, round_imbalance=1.0,
            server_mismatch=servers,
        )  # fmt: skip

    async def close(self) -> None:
        self.weight_source.close()

    async def hosts(self) -> list[str]:
        return ["localhost"]

    @property
    def watched(self) -> list[WatchedProcess]:
        return []

    def _server_mismatch(self, batch: TrainBatch) -> tuple[ServerMismatch, ...]:
        if batch.server_T is None:
            return ()
        of_servers = [np.abs(self._logprob - batch.rollout_logprobs_T[batch.server_T == number]) for number in range(batch.num_servers)]
        return tuple(ServerMismatch(mean=float(each.sum()) / max(len(each), 1), num_tokens=len(each)) for each in of_servers)

    def _export(self) -> dict[str, torch.Tensor]:
        with self._memory_states.running("export"):
            return dict(self._tensors_of_version())

    def _tensors_of_version(self) -> Iterator[tuple[str, torch.Tensor]]:
        for spec in self._tensors:
            yield spec.name, torch.full(spec.shape, float(self.version), dtype=getattr(torch, spec.dtype))
