"""One model beside the policy: a train group that is awake only while it is asked, and a part of the policy's checkpoints."""

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from moerl.cluster.placement import ProcessPlace
from moerl.config.derive.companion_models import CompanionModel, companion_config
from moerl.config.schema.run_config import RunConfig
from moerl.hangs.hang_reports import HangReports
from moerl.train.checkpoint.checkpoint_dirs import FileDigests, newest
from moerl.train.group import MegatronTrainGroup, Role
from moerl.types.batch import StoredBatch

logger = logging.getLogger(__name__)


class Companion:
    def __init__(
        self, config: RunConfig, model: CompanionModel, *, policy: MegatronTrainGroup, policy_dir: Path, checkpoint_dir: Path,
        places: Sequence[ProcessPlace] | None, hangs: HangReports,
    ):  # fmt: skip
        """`places`: of ranks of its own; None: it is on the policy's."""
        self.model, self.config, self._checkpoint_dir = model, companion_config(config, model), checkpoint_dir
        self._leaves = self.config.train.offload != "none"
        self.group = MegatronTrainGroup(
            self.config,
            model_dir=policy_dir if model.path is None else Path(model.path),
            checkpoint_dir=checkpoint_dir,
            places=places,
            hangs=hangs,
            role=Role(name=model.name, is_critic=model.is_critic, uses_reference=model.uses_reference, trains=model.trains),
            beside=policy if model.layout is None else None,
        )

    async def start(self) -> None:
        await self.group.start()
        if self._leaves:
            await self.group.sleep()

    async def load(self) -> None:
        """From the newest checkpoint, after the policy. Raises CheckpointError with every damaged file."""
        directory = newest(self._checkpoint_dir)
        if directory is None or not self.model.trains:
            return
        if not (directory / self.model.name).is_dir():
            logger.warning("%s has no %s: it begins anew, from its initial weights", directory, self.model.name)
            return
        async with self.awake():
            await self.group.load_part(directory, self.model.name)

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[MegatronTrainGroup]:
        """The group, which may be asked inside."""
        if not self._leaves:
            yield self.group
            return
        await self.group.wake()
        yield self.group
        await self.group.sleep()

    async def stage(self, *, copies: bool) -> int:
        async with self.awake() as group:
            return await group.stage(copies=copies or self._leaves)

    async def write(self, directory: Path) -> FileDigests:
        return await self.group.write(directory)


def plain(batch: StoredBatch) -> StoredBatch:
    """Its tokens and mask, without what concerns the policy, its servers and its routes."""
    return replace(
        batch.without_servers().without_routes().without_sets(),
        streams=frozenset(), old_logprobs=None, reference_logprobs=None, token_advantages=None, proximal=None, values=None, returns=None,
        process=None, process_reference=None, teacher_logprobs=None, kl_weights=None,
    )  # fmt: skip
