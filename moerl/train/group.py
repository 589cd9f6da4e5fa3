"""All ranks of one model, seen from the driver: verbs that run on every rank, one cause when a rank fails."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import ray

from moerl.algorithms.base import Objective
from moerl.cluster.hang import HangReports
from moerl.cluster.party import Party
from moerl.config.schema import RunConfig
from moerl.push_types import Bucket, Manifest, Transport
from moerl.train.calls import RankCalls, forget, has_failed, is_echo
from moerl.train.checkpoint import newest
from moerl.train.checkpoint_check import damaged, read_state
from moerl.train.saving import CheckpointSaver
from moerl.types import SavedCheckpoint, StepStats, TrainBatch

logger = logging.getLogger(__name__)


class TrainGroup(Protocol):
    """What the loop needs of a trainer. Implementations: MegatronTrainGroup, FakeTrainGroup."""

    async def start(self) -> None:
        """It starts awake."""

    def awake(self) -> AbstractAsyncContextManager[None]:
        """What training needs is on the GPU inside; afterwards the trainer sleeps, and every verb but close raises ResidencyError.

        Not to be nested. A failure inside leaves the trainer as it is.
        """

    async def load(self) -> tuple[int, dict[str, Any]]:
        """(version, the state saved with it) of the newest checkpoint; (0, {}) without one."""

    async def save(self, version: int, state: Mapping[str, Any]) -> None:
        """Begin a checkpoint; returns when training may go on. Raises what this or the one before failed with."""

    async def saved(self, *, wait: bool = False) -> list[SavedCheckpoint]:
        """Those completed since the last call; with `wait` also the one in flight. Raises what one failed with, once."""

    async def logprobs(self, batch: TrainBatch, *, records_routes: bool = False) -> np.ndarray:
        """float32 [T] aligned with token_ids_T, under the current weights.

        `records_routes`: the trainer keeps where tokens went, and replays it in the next update, which is of the same batch.
        """

    async def reference_logprobs(self, batch: TrainBatch) -> np.ndarray:
        """The same under the initial weights, whose routers choose for themselves."""

    async def update(self, batch: TrainBatch, objective: Objective, *, lr: float) -> StepStats: ...

    async def close(self) -> None:
        """End every rank; safe to call twice."""

    @property
    def parties(self) -> list[Party]:
        """Its ranks, for the report about a phase that hangs."""

    # weights.sync.WeightSource

    async def host(self) -> str: ...
    async def manifest(self, version: int) -> Manifest: ...
    async def listen(self, transport: Transport, num_receivers: int) -> str: ...
    async def connect(self) -> None: ...
    async def next_bucket(self, index: int) -> Bucket | None: ...
    async def transmit(self, bucket: Bucket) -> None: ...
    async def abandon(self) -> None: ...


class MegatronTrainGroup:
    """Ray actors running moerl.train.worker.TrainWorker, one per rank. Ray must be initialised."""

    def __init__(self, config: RunConfig, *, model_dir: Path, checkpoint_dir: Path, hangs: HangReports | None = None):
        """`hangs`: None: those of the run's directory; the same object for all who wait for the ranks tells one hang from two."""
        self._hangs = HangReports(config.run_dir) if hangs is None else hangs
        self._config, self._model_dir, self._checkpoint_dir = config, model_dir.resolve(), checkpoint_dir.resolve()
        self._workers: list[Any] = []
        self._calls: RankCalls | None = None
        self._joining_export: asyncio.Task[list[Any]] | None = None
        self._saver = CheckpointSaver(
            self._checkpoint_dir,
            model=json.loads((self._model_dir / "config.json").read_text()),
            keep=config.keep_checkpoints,
            in_background=config.checkpoint.async_save,
            all_ranks=self._all,
            rank0=self._rank0,
        )
        self._is_asleep = self._is_in_use = False

    async def start(self) -> None:
        from moerl.train.worker import SAVE_THREAD, TrainWorker

        config, num_ranks = self._config, self._config.train.layout.ranks
        resources = ray.cluster_resources()
        # Where there are fewer cores than ranks they share them; Ray would never start the last ones.
        share = {f"num_{name.lower()}s": 1 if resources.get(name, 0) >= num_ranks else 0 for name in ("CPU", "GPU")}
        actor = ray.remote(max_restarts=0, concurrency_groups={SAVE_THREAD: 1}, **share)(TrainWorker)
        self._workers = [actor.remote(rank, num_ranks) for rank in range(num_ranks)]
        run_dir = config.run_dir.resolve()
        self._calls = RankCalls(self._workers, config.deadlines, self._hangs)
        self._calls.know(await self._all("place", run_dir / "logs"))
        host, port = await self._rank0("host"), await self._rank0("open_store")
        # The driver's deadline comes first, with a report; without a driver the ranks end by themselves.
        patches = await self._all("start", self._settings(), config.seed, host, port, 2 * config.deadlines.longest_seconds)
        logger.info("%d ranks started on %s; patches: %s", num_ranks, host, ", ".join(patches[0]))

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        assert not self._is_in_use, "awake() inside awake(): the inner one would end with a trainer that sleeps"
        if self._is_asleep:
            await self._all("wake")
        self._is_in_use, self._is_asleep = True, False
        yield
        await self._all("sleep")
        self._is_in_use, self._is_asleep = False, True

    async def load(self) -> tuple[int, dict[str, Any]]:
        directory = newest(self._checkpoint_dir)
        if directory is None:
            return 0, {}
        state = read_state(directory)
        if faults := [fault for share in await self._all("faults_of_checkpoint", directory) for fault in share]:
            raise damaged(directory, sorted(faults))
        await self._all("load", directory)
        # Weights that were converted, not trained here: the run begins with them.
        return (0, {}) if state.get("weights_only", False) else (state["version"], state)

    async def save(self, version: int, state: Mapping[str, Any]) -> None:
        await self._saver.save(version, state)

    async def saved(self, *, wait: bool = False) -> list[SavedCheckpoint]:
        return await self._saver.saved(wait=wait)

    async def logprobs(self, batch: TrainBatch, *, records_routes: bool = False) -> np.ndarray:
        return (await self._all("logprobs", ray.put(batch), records_routes))[0]

    async def reference_logprobs(self, batch: TrainBatch) -> np.ndarray:
        return (await self._all("reference_logprobs", ray.put(batch)))[0]

    async def update(self, batch: TrainBatch, objective: Objective, *, lr: float) -> StepStats:
        return (await self._all("update", ray.put(batch), objective, lr, self._config.train.updates_per_step))[0]

    async def export_hf(self, directory: Path) -> None:
        """The weights as safetensors of at most about 5 GB each, with their index, into an absolute path."""
        await self._all("export_hf", directory, 5 * 10**9)

    async def close(self) -> None:
        self._saver.close()
        if self._joining_export is not None:
            self._joining_export.cancel()
        for worker in self._workers:
            ray.kill(worker)
        if self._calls is not None:
            await self._calls.end()
        self._workers, self._calls = [], None

    @property
    def parties(self) -> list[Party]:
        return [] if self._calls is None else self._calls.parties

    # -- WeightSource ------------------------------------------------------------------------------------------

    async def host(self) -> str:
        return await self._rank0("host")

    async def manifest(self, version: int) -> Manifest:
        return (await self._all("manifest", version))[0]

    async def listen(self, transport: Transport, num_receivers: int) -> str:
        directory = self._checkpoint_dir.parent / "push"
        return await self._rank0("listen", transport, num_receivers, self._config.weights, await self.host(), directory)

    async def connect(self) -> None:
        await self._rank0("connect")

    async def next_bucket(self, index: int) -> Bucket | None:
        """Rank 0 packs while the others take part in the export; it may wait for one of them that has failed."""
        if index == 0:
            others = range(1, self._config.train.layout.ranks)
            self._joining_export = asyncio.create_task(self._on_ranks("join_export", others))
        assert self._joining_export is not None, "bucket 0 begins a push"
        packing, joining = asyncio.create_task(self._rank0("next_bucket", index)), self._joining_export
        while not packing.done() and not has_failed(joining):
            await asyncio.wait([task for task in (packing, joining) if not task.done()], return_when=asyncio.FIRST_COMPLETED)
        if has_failed(packing) or has_failed(joining):
            await asyncio.wait([packing, joining], timeout=self._config.deadlines.settle_seconds)
            forget([packing, joining])
            raise min((error for task in (packing, joining) if task.done() and (error := task.exception())), key=is_echo)
        bucket: Bucket | None = packing.result()
        if bucket is None:
            await joining
        return bucket

    async def transmit(self, bucket: Bucket) -> None:
        await self._rank0("transmit", bucket)

    async def abandon(self) -> None:
        """An export is a collective, so that every rank runs it to its end."""
        assert self._joining_export is not None, "bucket 0 begins a push"
        await asyncio.gather(self._rank0("drop_export"), self._joining_export)

    # -- calls -------------------------------------------------------------------------------------------------

    def _settings(self) -> Any:
        """Not imported at the top: the engine imports Megatron, which only patched processes may."""
        from moerl.train.settings import EngineSettings

        config = self._config
        return EngineSettings(
            train=config.train,
            model_dir=self._model_dir,
            max_context=config.model.max_context,
            temperature=config.rollout.temperature,
            uses_reference=config.uses_reference,
            export_dtype=config.rollout_dtype,
        )

    async def _rank0(self, verb: str, *args: Any) -> Any:
        return (await self._on_ranks(verb, [0], *args))[0]

    async def _all(self, verb: str, *args: Any) -> list[Any]:
        return await self._on_ranks(verb, range(self._config.train.layout.ranks), *args)

    async def _on_ranks(self, verb: str, ranks: Sequence[int], *args: Any) -> list[Any]:
        assert self._calls is not None, f"{verb}: the ranks have not started, or are closed"
        return await self._calls.on_ranks(verb, ranks, *args)
