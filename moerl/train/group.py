"""All ranks of one model, seen from the driver: verbs that run on every rank, one cause when a rank fails."""

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import ray

from moerl.algorithms.mini_batch_loss import Loss, ValueLossSettings
from moerl.cluster.placement import ProcessPlace, find_placement
from moerl.config.derive.gpu_map import num_shared
from moerl.config.schema.custom_part import modules_of_files
from moerl.config.schema.run_config import RunConfig
from moerl.hangs.hang_reports import HangReports
from moerl.hangs.watched import WatchedProcess
from moerl.train.batching.rank_share import shares
from moerl.train.checkpoint.checkpoint_check import damaged, faults_while_loading, files_of_model, read_state
from moerl.train.checkpoint.checkpoint_dirs import FileDigests, WrittenShards, newest
from moerl.train.checkpoint.saver import CheckpointSaver
from moerl.train.engine_settings import EngineSettings
from moerl.train.push.push_source import MegatronSource
from moerl.train.rank_processes import RankProcesses
from moerl.types.batch import Batch, StoredBatch
from moerl.types.errors import TrainError
from moerl.types.stats import MemoryStats, SavedCheckpoint, StepStats
from moerl.types.stored import Here, Stored, keep
from moerl.weights.sync import WeightSource


class TrainGroup(Protocol):
    """Trainer as the loop needs it. Implementations: MegatronTrainGroup, and tests' FakeTrainGroup."""

    async def start(self) -> None:
        """It starts awake."""

    async def wake(self) -> int:
        """From sleep, after which every verb but wake and close raises ResidencyError if something was offloaded. Bytes of all ranks that
        came to the GPUs."""

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


@dataclass(frozen=True, kw_only=True)
class Role:
    """Part that a model plays in a run."""

    name: str = "policy"
    uses_reference: bool = False
    """Its initial weights are kept, for reference_logprobs."""
    is_critic: bool = False
    trains: bool = True
    """Else its ranks have neither optimizer nor reference, and only score and send."""


class MegatronTrainGroup:
    """A model on its ranks, or beside another one on that one's."""

    def __init__(
        self,
        config: RunConfig,
        *,
        model_dir: Path,
        checkpoint_dir: Path,
        places: Sequence[ProcessPlace] | None = None,
        hangs: HangReports | None = None,
        trains: bool = True,
        role: Role | None = None,
        beside: "MegatronTrainGroup | None" = None,
    ):
        """`places`: of the ranks; None: found when it starts. `hangs`: None: those of the run's directory; one object for all who wait
        for the ranks tells one hang from two. `trains`: of a policy. `role`: None: it is the policy. `beside`: on the ranks of that group,
        which starts first."""
        self.role = Role(uses_reference=config.uses_reference and trains, trains=trains) if role is None else role
        self._places = places
        self._config, self._model_dir, self._checkpoint_dir = config, model_dir.resolve(), checkpoint_dir.resolve()
        title = "rank" if role is None else f"{self.role.name} rank"
        self._is_guest = beside is not None
        hangs = HangReports(config.run_dir) if hangs is None else hangs
        self._ranks: RankProcesses = RankProcesses(config, hangs, title=title) if beside is None else beside._ranks
        self.weight_source = MegatronSource(
            config.weights,
            directory=checkpoint_dir.parent.resolve() / "push",  # of the run, also where its checkpoints are a link to another disk
            all_ranks=self._ranks.all,
            one_rank=self._ranks.one,
            shares_gpus=num_shared(config) > 0,
        )
        self.saver = CheckpointSaver(
            self._checkpoint_dir,
            model=json.loads((self._model_dir / "config.json").read_text()),
            keep=config.keep_checkpoints,
            in_background=config.checkpoint.async_save,
            policy=self,
        )

    async def start(self) -> None:
        if self._is_guest:
            await self._ranks.all("add_model", self.role.name, self._settings())
        else:
            places = find_placement(self._config).ranks if self._places is None else self._places
            await self._ranks.start(places, self._settings())
        self._planner = await self._rank0("planner")

    async def wake(self) -> int:
        return await self._moved("wake")

    async def shed(self) -> int:
        return await self._moved("shed")

    async def sleep(self) -> int:
        return await self._moved("sleep")

    async def _moved(self, verb: str) -> int:
        """Without offload nothing ever leaves the device, and no rank is asked: a step has three of these calls to every rank."""
        return 0 if self._config.train.offload == "none" else sum(await self._all(verb))

    async def load(self) -> tuple[int, dict[str, Any]]:
        directory = newest(self._checkpoint_dir)
        if directory is None:
            return 0, {}
        state = await self._load(directory)
        return state["version"], state

    async def load_weights(self, directory: Path) -> int:
        """Weights of this checkpoint, and nothing else; its version. For a group that does not train."""
        assert not self.role.trains, "a trainer's optimizer would go on from other weights"
        return int((await self._load(directory))["version"])

    async def load_part(self, directory: Path, part: str) -> None:
        """From the folder of a checkpoint that `write` wrote. Raises CheckpointError, as all of these, with every damaged file."""
        files = files_of_model(directory, part)
        folder = f"{part}/" if part else ""
        try:
            found: list[list[str]] = await self._all("load", directory / part, files)
            if not found[0]:
                return
            others = await self._ranks.all("faults_of_checkpoint", directory, [folder + name for name in files])
        except TrainError as error:
            if await asyncio.to_thread(directory.is_dir):
                raise
            raise damaged(directory, []) from error  # while it was read
        faults = faults_while_loading(directory, [folder + name for name in found[0]])
        raise damaged(directory, sorted([*faults, *(fault for share in others for fault in share)]))

    async def _load(self, directory: Path) -> dict[str, Any]:
        state = read_state(directory)
        await self.load_part(directory, "")
        return state

    async def save(self, version: int, state: Mapping[str, Any]) -> None:
        await self.saver.save(version, state)

    async def saved(self, *, wait: bool = False) -> list[SavedCheckpoint]:
        return await self.saver.saved(wait=wait)

    async def stage(self, *, copies: bool) -> int:
        return sum(await self._all("stage_checkpoint", copies))

    async def write(self, directory: Path) -> FileDigests:
        written: list[WrittenShards] = await self._all("write_checkpoint", directory)
        common: FileDigests = await self._rank0("finish_checkpoint", directory, [share.index for share in written])
        return {name: entry for share in (*(each.files for each in written), common) for name, entry in share.items()}

    async def logprobs(self, batch: Batch, *, records_routes: bool = False) -> Stored[np.ndarray]:
        return (await self._on_shares("logprobs", batch, records_routes))[0]

    async def reference_logprobs(self, batch: Batch) -> Stored[np.ndarray]:
        return (await self._on_shares("reference_logprobs", batch))[0]

    async def values(self, batch: Batch) -> Stored[np.ndarray]:
        """float32 [T], a critic's, of the batch's sequences end to end."""
        return (await self._on_shares("values", batch))[0]

    async def update(self, batch: Batch, loss: Loss | ValueLossSettings, *, lr: float) -> StepStats:
        for module in modules_of_files():
            ray.cloudpickle.register_pickle_by_value(module)  # nodes need not have a user's file
        if isinstance(batch, StoredBatch):
            batch = await asyncio.to_thread(_kept, batch)
        found: list[StepStats] = await self._on_shares("update", batch, loss, lr, self._config.train.updates_per_step)
        return replace(found[0], memory=max((stats.memory for stats in found if stats.memory is not None), key=MemoryStats.most))

    async def hosts(self) -> list[str]:
        return await self._ranks.all("address")

    async def export_hf(self, directory: Path) -> None:
        """The weights as safetensors of at most about 5 GB each, with their index, into an absolute path."""
        await self._all("export_hf", directory, 5 * 10**9)

    async def close(self) -> None:
        self.saver.close()
        if not self._is_guest:
            await self._ranks.close()

    @property
    def watched(self) -> list[WatchedProcess]:
        return [] if self._is_guest else self._ranks.watched

    # -- calls -------------------------------------------------------------------------------------------------

    def _settings(self) -> EngineSettings:
        config, role = self._config, self.role
        pushes = role.name == "policy"
        return EngineSettings(
            train=config.train,
            model_dir=self._model_dir,
            max_context=config.model.max_context,
            temperature=config.rollout.temperature,
            uses_reference=role.uses_reference,
            export_dtype=config.rollout_dtype,
            push_fp8=config.fp8_scales if pushes else None,
            pushes_mtp=pushes and config.pushes_mtp,
            mismatch_limit=config.mismatch_limit if pushes else math.inf,
            model=role.name,
            is_critic=role.is_critic,
            trains=role.trains,
        )

    async def _on_shares(self, verb: str, batch: Batch, *args: Any) -> list[Any]:
        """Every rank's answer to the verb about `batch`, which it processes in mini-batches; a rank gets its own share."""
        if isinstance(batch, StoredBatch):
            # In a thread: planning thousands of sequences takes a while, and completions of later steps are arriving.
            parts = await asyncio.to_thread(shares, batch, self._planner, self._config.train.updates_per_step)
            of_data_rank = [ray.put(part) for part in parts]
            batches = [of_data_rank[rank] for rank in self._ranks.data_ranks]
        else:
            batches = [ray.put(batch)] * self._ranks.num_ranks
        return await self._ranks.on_ranks(verb, range(self._ranks.num_ranks), self.role.name, *args, each=batches)

    async def _all(self, verb: str, *args: Any) -> list[Any]:
        return await self._ranks.all(verb, self.role.name, *args)

    async def _rank0(self, verb: str, *args: Any) -> Any:
        return await self._ranks.one(0, verb, self.role.name, *args)


def _kept(batch: StoredBatch) -> StoredBatch:
    """With columns of all tokens that the driver made in the object store: once for all ranks."""

    def kept(column: Stored[np.ndarray] | None) -> Stored[np.ndarray] | None:
        return keep(column.value) if isinstance(column, Here) else column

    return replace(batch, token_advantages=kept(batch.token_advantages), returns=kept(batch.returns))
