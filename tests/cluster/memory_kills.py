"""A Ray whose nodes are always short of memory: what calls to a rank and to a collector end with, as JSON. A process of its own."""

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path

import ray

from moerl.cluster.run_secret import RunSecret
from moerl.config.schema.deadlines import DeadlineConfig
from moerl.hangs.hang_reports import HangReports
from moerl.rollout.fleet.collector import Intake
from moerl.rollout.fleet.ray_collectors import RayCollectors
from moerl.train.rank_calls import RankCalls
from moerl.types.errors import MoerlError

SETTINGS = {"RAY_memory_monitor_refresh_ms": "100", "RAY_memory_usage_threshold": "0.001", "RAY_USAGE_STATS_ENABLED": "0"}


class Rank:
    async def update(self):
        await asyncio.sleep(60)


class NoLetters:
    def decode(self, token_ids, *, skip_special_tokens):
        return ""


async def failure(work):
    try:
        await work
    except MoerlError as error:
        return {"text": str(error), "exit_code": error.exit_code, "who": error.origin.who, "details": error.origin.details}
    raise AssertionError("nothing failed")


async def main():
    hangs = HangReports(Path(tempfile.mkdtemp()))
    ranks = RankCalls([ray.remote(num_cpus=0)(Rank).remote()], DeadlineConfig(settle_seconds=1), hangs)
    collectors = RayCollectors(
        Intake(vocab_size=8, decoder=NoLetters(), routes=None), secret=RunSecret.new(), num_actors=1, start_seconds=60
    )
    rank, collector = await asyncio.gather(failure(ranks.on_ranks("update", [0])), failure(collectors.start()))
    print(json.dumps({"rank": rank, "collector": collector}))


if __name__ == "__main__":
    os.environ.update(SETTINGS)
    path = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}
    ray.init("local", include_dashboard=False, log_to_driver=False, logging_level="ERROR", num_cpus=1, runtime_env=path)
    asyncio.run(main())
