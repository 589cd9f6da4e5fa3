"""All ranks of one model, seen from the driver: verbs that run on every rank, one cause when a rank fails."""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import ray

from moerl.algorithms.algorithm import Loss
from moerl.cluster.placement import ProcessPlace, find_placement
from moerl.cluster.ray_nodes import only_on
from moerl.config.derive.gpu_map import num_shared
from moerl.config.schema.custom_part import modules_of_files
from moerl.config.schema.run_config import RunConfig
from moerl.hangs.hang_reports import HangReports
from moerl.hangs.watched import WatchedProcess
from moerl.train.batching.rank_share import shares
from moerl.train.checkpoint.checkpoint_check import damaged, read_state
from moerl.train.checkpoint.checkpoint_dirs import newest
from moerl.train.checkpoint.saver import CheckpointSaver
from moerl.train.push.push_source import MegatronSource
from moerl.train.rank_calls import RankCalls
from moerl.types.stats import SavedCheckpoint, StepStats
from moerl.types.stored import Here, Stored, keep
from moerl.types.stored_batch import Batch, StoredBatch
from moerl.weights.sync import WeightSource

logger = logging.getLogger(__name__)


class TrainGroup(Protocol):
    """Trainer as the loop needs it. Implementations: MegatronTrainGroup, FakeTrainGroup."""

    async def start(self) -> None:
        """It starts awake."""

    async def wake(self) -> int:
        """From sleep, after which every verb but wake and close raises ResidencyError. Bytes of all ranks that came to the GPUs."""

    async def shed(self) -> int:
        """Keep on the GPUs only what log-probs and a push need, until a verb needs more. Bytes of all ranks that left; so for sleep."""

    async def sleep(self) -> int: ...

    async def load(self) -> tuple[int, dict[str, Any]]:
        """(version, the state saved with it) of the newest checkpoint; (0, {}) without one."""

    async def save(self, version: int, state: Mapping[str, Any]) -> None:
        """Begin a checkpoint; returns when training may go on. Raises what this or the one before failed with."""

    async def saved(self, *, wait: bool = False) -> list[SavedCheckpoint]:
        """Those completed since the last call; with `wait` also the one in flight. Raises what one failed with, once."""

    async def logprobs(self, batch: Batch, *, records_routes: bool = False) -> Stored[np.ndarray]:
        """float32 [T] of the batch's sequences end to end, under the current weights.

        `records_routes`: the trainer keeps where tokens went, and replays it in the next update, which is of the same batch.
        """

    async def reference_logprobs(self, batch: Batch) -> Stored[np.ndarray]:
        """The same under the initial weights, whose routers choose for themselves."""

    async def update(self, batch: Batch, loss: Loss, *, lr: float) -> StepStats: ...

    async def close(self) -> None:
        """End every rank; safe to call twice."""

    async def hosts(self) -> list[str]:
        """Addresses of the ranks, in their order."""

    @property
    def watched(self) -> list[WatchedProcess]:
        """Its ranks, for the report about a phase that hangs."""

    @property
    def weight_source(self) -> WeightSource:
        """Source that a push is fed from."""


class MegatronTrainGroup:
    """Ray actors running moerl.train.train_worker.TrainWorker, one per rank. Ray must be initialised."""

    def __init__(
        self,
        config: RunConfig,
        *,
        model_dir: Path,
        checkpoint_dir: Path,
        places: Sequence[ProcessPlace] | None = None,
        hangs: HangReports | None = None,
        trains: bool = True,
    ):
        """`places`: of the ranks; None: found when it starts. `hangs`: None: those of the run's directory; one object for all who wait
        for the ranks tells one hang from two. `trains`: else the ranks have neither optimizer nor reference, and only score and send."""
        self._trains = trains
        self._places, self._hangs = places, HangReports(config.run_dir) if hangs is None else hangs
        self._config, self._model_dir, self._checkpoint_dir = config, model_dir.resolve(), checkpoint_dir.resolve()
        self._workers: list[Any] = []
        self._calls: RankCalls | None = None
        self._source = MegatronSource(
            config.weights,
            directory=self._checkpoint_dir.parent / "push",
            all_ranks=self._all,
            one_rank=self._one_rank,
            shares_gpus=num_shared(config) > 0,
        )
        self._saver = CheckpointSaver(
            self._checkpoint_dir,
            model=json.loads((self._model_dir / "config.json").read_text()),
            keep=config.keep_checkpoints,
            in_background=config.checkpoint.async_save,
            all_ranks=self._all,
            rank0=self._rank0,
        )

    async def start(self) -> None:
        from moerl.train.train_worker import SAVE_THREAD, TrainWorker

        config, num_ranks = self._config, self._config.train.layout.ranks
        places = find_placement(config).ranks if self._places is None else self._places
        actor = ray.remote(max_restarts=0, concurrency_groups={SAVE_THREAD: 1})(TrainWorker)
        options = [_options(place, places) for place in places]
        self._workers = [actor.options(**options[rank]).remote(rank, num_ranks, place.gpus) for rank, place in enumerate(places)]
        self._calls = RankCalls(self._workers, config.deadlines, self._hangs)
        self._calls.know(await self._all("place", config.run_dir.resolve() / "logs"))
        logger.info("%d rank processes are there", num_ranks)
        network = await self._all("use_network", config.network)
        logger.info("rank 0's network settings: %s", network[0] or "none")
        host, port = await self._rank0("address"), await self._rank0("open_store")
        # The driver's deadline comes first, with a report; without a driver the ranks end by themselves.
        patches = await self._all("start", self._settings(), config.seed, host, port, 2 * config.deadlines.longest_seconds)
        self._data_ranks = await self._all("data_rank")
        self._planner = await self._rank0("planner")
        logger.info("%d ranks started on %s; patches: %s", num_ranks, host, ", ".join(patches[0]))

    async def wake(self) -> int:
        return sum(await self._all("wake"))

    async def shed(self) -> int:
        return sum(await self._all("shed"))

    async def sleep(self) -> int:
        return sum(await self._all("sleep"))

    async def load(self) -> tuple[int, dict[str, Any]]:
        directory = newest(self._checkpoint_dir)
        if directory is None:
            return 0, {}
        state = await self._load(directory)
        return state["version"], state

    async def load_weights(self, directory: Path) -> int:
        """Weights of this checkpoint, and nothing else; its version. For a group that does not train."""
        assert not self._trains, "a trainer's optimizer would go on from other weights"
        return int((await self._load(directory))["version"])

    async def _load(self, directory: Path) -> dict[str, Any]:
        state = read_state(directory)
        if faults := [fault for share in await self._all("faults_of_checkpoint", directory) for fault in share]:
            raise damaged(directory, sorted(faults))
        await self._all("load", directory)
        return state

    async def save(self, version: int, state: Mapping[str, Any]) -> None:
        await self._saver.save(version, state)

    async def saved(self, *, wait: bool = False) -> list[SavedCheckpoint]:
        return await self._saver.saved(wait=wait)

    async def logprobs(self, batch: Batch, *, records_routes: bool = False) -> Stored[np.ndarray]:
        num_updates = self._config.train.updates_per_step
        return (await self._on_shares("logprobs", batch, num_updates, records_routes))[0]

    async def reference_logprobs(self, batch: Batch) -> Stored[np.ndarray]:
        num_updates = self._config.train.updates_per_step
        return (await self._on_shares("reference_logprobs", batch, num_updates))[0]

    async def update(self, batch: Batch, loss: Loss, *, lr: float) -> StepStats:
        for module in modules_of_files():
            ray.cloudpickle.register_pickle_by_value(module)  # nodes need not have a user's file
        num_updates = self._config.train.updates_per_step
        if isinstance(batch, StoredBatch) and isinstance(batch.token_advantages, Here):
            batch = replace(batch, token_advantages=await asyncio.to_thread(keep, batch.token_advantages.value))  # once for all ranks
        return (await self._on_shares("update", batch, num_updates, loss, lr, num_updates))[0]

    async def hosts(self) -> list[str]:
        return await self._all("address")

    @property
    def weight_source(self) -> WeightSource:
        return self._source

    async def export_hf(self, directory: Path) -> None:
        """The weights as safetensors of at most about 5 GB each, with their index, into an absolute path."""
        await self._all("export_hf", directory, 5 * 10**9)

    async def close(self) -> None:
        self._saver.close()
        for worker in self._workers:
            ray.kill(worker)
        if self._calls is not None:
            await self._calls.end()
        self._workers, self._calls = [], None

    @property
    def watched(self) -> list[WatchedProcess]:
        return [] if self._calls is None else self._calls.watched

    # -- calls -------------------------------------------------------------------------------------------------

    def _settings(self) -> Any:
        """Not imported at the top: the engine imports Megatron, which only patched processes may."""
        from moerl.train.engine_settings import EngineSettings

        config = self._config
        return EngineSettings(
            train=config.train,
            model_dir=self._model_dir,
            max_context=config.model.max_context,
            temperature=config.rollout.temperature,
            uses_reference=config.uses_reference and self._trains,
            export_dtype=config.rollout_dtype,
            push_fp8=config.rollout.layout.weights == "fp8",
            mismatch_limit=config.weights.mismatch_limit,
            trains=self._trains,
        )

    async def _on_shares(self, verb: str, batch: Batch, num_parts: int, *args: Any) -> list[Any]:
        """Every rank's answer to the verb about `batch`, which it processes in `num_parts` mini-batches; a rank gets its own share."""
        if isinstance(batch, StoredBatch):
            # In a thread: planning thousands of sequences takes a while, and completions of later steps are arriving.
            parts = await asyncio.to_thread(shares, batch, self._planner, num_parts)
            of_data_rank = [ray.put(part) for part in parts]
            batches = [of_data_rank[rank] for rank in self._data_ranks]
        else:
            batches = [ray.put(batch)] * len(self._workers)
        return await self._on_ranks(verb, range(len(self._workers)), *args, each=batches)

    async def _rank0(self, verb: str, *args: Any) -> Any:
        return (await self._on_ranks(verb, [0], *args))[0]

    async def _one_rank(self, rank: int, verb: str, *args: Any) -> Any:
        return (await self._on_ranks(verb, [rank], *args))[0]

    async def _all(self, verb: str, *args: Any) -> list[Any]:
        return await self._on_ranks(verb, range(self._config.train.layout.ranks), *args)

    async def _on_ranks(self, verb: str, ranks: Sequence[int], *args: Any, each: Sequence[Any] | None = None) -> list[Any]:
        assert self._calls is not None, f"{verb}: the ranks have not started, or are closed"
        return await self._calls.on_ranks(verb, ranks, *args, each=each)


def _options(place: ProcessPlace, places: Sequence[ProcessPlace]) -> dict[str, Any]:
    """Ray's, for the rank at `place`."""
    # Where a node has fewer cores than ranks they share them; Ray would never start the last ones.
    num_cpus = 1 if place.node.num_cpus >= sum(other.node.id == place.node.id for other in places) else 0
    return {"num_cpus": num_cpus, "num_gpus": 0 if place.gpus is None else 1, "scheduling_strategy": only_on(place.node.id)}
