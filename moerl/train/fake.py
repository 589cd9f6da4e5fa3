"""A trainer without a model: it counts versions, answers uniform log-probs, and pushes tensors whose values are the version.

For tests of everything around the trainer; checkpoints hold the driver's state only.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moerl.algorithms.base import Objective
from moerl.cluster.party import Party
from moerl.push_types import TensorSpec
from moerl.train import checkpoint
from moerl.train.checkpoint_check import read_state
from moerl.train.residency import Residency
from moerl.types import SavedCheckpoint, StepStats, TrainBatch
from moerl.weights.local import LocalSource


class FakeTrainGroup:
    def __init__(self, *, vocab_size: int, tensors: tuple[TensorSpec, ...], checkpoint_dir: Path, keep: int = 2):
        self._logprob = -float(np.log(vocab_size))
        self._tensors, self._checkpoint_dir, self._keep = tensors, checkpoint_dir, keep
        self.weight_source = LocalSource(self._export, bucket_bytes=2**20)
        self._residency = Residency("none", move=lambda before, after: None, measure=dict)
        self.version = 0
        self.batches: list[TrainBatch] = []
        self._saved: list[SavedCheckpoint] = []

    async def start(self) -> None: ...

    async def wake(self) -> int:
        return self._residency.wake()

    async def shed(self) -> int:
        return self._residency.shed()

    async def sleep(self) -> int:
        return self._residency.sleep()

    async def load(self) -> tuple[int, dict[str, Any]]:
        directory = checkpoint.newest(self._checkpoint_dir)
        if directory is None:
            return 0, {}
        with self._residency.running("load"):
            state = read_state(directory)
            self.version = state["version"]
        return self.version, state

    async def save(self, version: int, state: Mapping[str, Any]) -> None:
        with self._residency.running("save"):
            weights = self.version
        self._write(version, weights, state)

    def _write(self, version: int, weights: int, state: Mapping[str, Any]) -> None:
        temporary = checkpoint.begin(self._checkpoint_dir, version)
        (temporary / "weights.json").write_text(json.dumps(weights))
        files = checkpoint.digest_files(temporary, ["weights.json"])
        checkpoint.commit(temporary, files, {"version": version, **state}, {}, keep=self._keep)
        self._saved.append(SavedCheckpoint(version=version, num_bytes=0, seconds=0.0, blocked_seconds=0.0))

    async def saved(self, *, wait: bool = False) -> list[SavedCheckpoint]:
        saved, self._saved = self._saved, []
        return saved

    async def logprobs(self, batch: TrainBatch, *, records_routes: bool = False) -> np.ndarray:
        with self._residency.running("logprobs"):
            return np.full(len(batch.token_ids_T), self._logprob, dtype=np.float32)

    async def reference_logprobs(self, batch: TrainBatch) -> np.ndarray:
        return await self.logprobs(batch)

    async def update(self, batch: TrainBatch, objective: Objective, *, lr: float) -> StepStats:
        with self._residency.running("update"):
            self.version += 1
            self.batches.append(batch)
        mismatch_T = np.abs(self._logprob - batch.rollout_logprobs_T[batch.response_mask_T])
        return StepStats(
            loss=0.0, grad_norm=0.0, learning_rate=lr, num_tokens=int(batch.response_mask_T.sum()), entropy=-self._logprob, kl_old=0.0,
            kl_reference=None, clip_fraction=0.0, mismatch_mean=float(mismatch_T.mean()), mismatch_max=float(mismatch_T.max()),
            mismatch_kl=0.0, padding_fraction=0.0, rank_imbalance=1.0, round_imbalance=1.0,
        )  # fmt: skip

    async def close(self) -> None:
        self.weight_source.close()

    async def hosts(self) -> list[str]:
        return ["localhost"]

    @property
    def parties(self) -> list[Party]:
        return []

    def _export(self) -> dict[str, torch.Tensor]:
        with self._residency.running("export"):
            return dict(self._tensors_of_version())

    def _tensors_of_version(self) -> Iterator[tuple[str, torch.Tensor]]:
        for spec in self._tensors:
            yield spec.name, torch.full(spec.shape, float(self.version), dtype=getattr(torch, spec.dtype))
