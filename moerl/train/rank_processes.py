"""Processes of the ranks of one layout, as Ray actors: they hold a model, and perhaps others beside it, on the same process groups."""

import logging
from collections.abc import Sequence
from typing import Any

import ray

from moerl.cluster.placement import ProcessPlace
from moerl.cluster.ray_nodes import only_on
from moerl.config.derive.rdma import crosses_nodes
from moerl.config.schema.custom_part import folders_of_files
from moerl.config.schema.run_config import RunConfig
from moerl.hangs.hang_reports import HangReports
from moerl.hangs.watched import WatchedProcess
from moerl.train.engine_settings import EngineSettings
from moerl.train.rank_calls import RankCalls

logger = logging.getLogger(__name__)


class RankProcesses:
    """Actors running moerl.train.train_worker.TrainWorker, one per rank. Ray must be initialised."""

    def __init__(self, config: RunConfig, hangs: HangReports, *, title: str = "rank"):
        """`title`: what reports and logs call one of them, before its number."""
        self._config, self._hangs, self._title = config, hangs, title
        self._workers: list[Any] = []
        self._calls: RankCalls | None = None
        self.data_ranks: list[int] = []
        """By rank, which of the shares of a batch it gets."""

    async def start(self, places: Sequence[ProcessPlace], settings: EngineSettings) -> None:
        """`settings`: of the model that they start with."""
        from moerl.train.train_worker import SAVE_THREAD, TrainWorker

        config, num_ranks = self._config, len(places)
        actor = ray.remote(max_restarts=0, concurrency_groups={SAVE_THREAD: 1})(TrainWorker)
        options = [_options(place, places, beside=self._title != "rank") for place in places]
        self._workers = [actor.options(**options[rank]).remote(rank, num_ranks, place.gpus) for rank, place in enumerate(places)]
        self._calls = RankCalls(self._workers, config.deadlines, self._hangs, title=self._title)
        logs, name = config.run_dir.resolve() / "logs", self._title.replace(" ", "-")
        self._calls.know(await self.on_ranks("place", range(num_ranks), each=[logs / f"{name}-{rank}.log" for rank in range(num_ranks)]))
        logger.info("%d processes are there: %s", num_ranks, self._title)
        told = await self.all(
            "set_environment", config.network, config.train.environment, crosses_nodes(config, "train"), folders_of_files()
        )
        logger.info("%s 0's network settings and variables: %s", self._title, told[0] or "none")
        host, port = await self.one(0, "address"), await self.one(0, "open_store")
        # The driver's deadline comes first, with a report; without a driver the ranks end by themselves.
        patches = await self.all("start", settings, config.seed, host, port, 2 * config.deadlines.longest_seconds)
        self.data_ranks = await self.all("data_rank")
        logger.info("%d started on %s: %s; patches: %s", num_ranks, host, self._title, ", ".join(patches[0]))

    async def all(self, verb: str, *args: Any) -> list[Any]:
        return await self.on_ranks(verb, range(len(self._workers)), *args)

    async def one(self, rank: int, verb: str, *args: Any) -> Any:
        return (await self.on_ranks(verb, [rank], *args))[0]

    async def on_ranks(self, verb: str, ranks: Sequence[int], *args: Any, each: Sequence[Any] | None = None) -> list[Any]:
        assert self._calls is not None, f"{verb}: the ranks have not started, or are closed"
        return await self._calls.on_ranks(verb, ranks, *args, each=each)

    async def close(self) -> None:
        """End every one; safe to call twice."""
        for worker in self._workers:
            ray.kill(worker)
        if self._calls is not None:
            await self._calls.end()
        self._workers, self._calls = [], None

    @property
    def num_ranks(self) -> int:
        return len(self._workers)

    @property
    def watched(self) -> list[WatchedProcess]:
        return [] if self._calls is None else self._calls.watched


def _options(place: ProcessPlace, places: Sequence[ProcessPlace], *, beside: bool) -> dict[str, Any]:
    """Ray's, for the rank at `place`. `beside`: of another model than the policy."""
    # Where a node has fewer cores than ranks they share them; Ray would never start the last ones.
    is_room = not beside and place.node.num_cpus >= sum(other.node.id == place.node.id for other in places)
    return {
        "num_cpus": 1 if is_room else 0, "num_gpus": len(place.gpus), "scheduling_strategy": only_on(place.node.id)
    }  # fmt: skip
