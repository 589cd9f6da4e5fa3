"""Ways not to wait for the longest completions of a step: staleness, against more groups than needed of which the first finished train.

    python benchmarks/long_tail.py --steps 30

On the clock of benchmarks/pool.py: real pool and buffer, servers and trainer that only wait. staleness k: as the loop does with
max_staleness=k. first finished: max_staleness=0, 1.5 times as many groups are started, and those that are unfinished when enough are
there are thrown away. unused: share of the slots' time that no completion which trained took. Lengths are means.
"""

import argparse
import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pool import LONGEST, PROMPT, JumpingClock, Waiting, collector

from moerl.rollout.buffer import GroupBuffer
from moerl.rollout.fleet.rollout_pool import RolloutPool
from moerl.types.completion import SamplingParams
from moerl.types.groups import Group, Prompt


@dataclass(kw_only=True)
class Steps:
    """`play` one way."""

    arguments: argparse.Namespace
    seconds: float = 0.0
    drawn: dict[int, np.ndarray] = field(default_factory=dict)
    """Lengths, by group."""
    trained: list[int] = field(default_factory=list)

    def play(self, way: Coroutine[Any, Any, None]) -> "Steps":
        with asyncio.Runner(loop_factory=JumpingClock) as runner:
            runner.run(way)
            self.seconds = runner.get_loop().time()
        return self

    def pool(self) -> RolloutPool:
        arguments = self.arguments
        engines = [Waiting(f"server-{index}", arguments.running, 1.0) for index in range(arguments.servers)]
        pool = RolloutPool(
        engines,  # type: ignore[arg-type]
        max_running=arguments.running, max_queued=2, collector=collector(), request_seconds=1e9,
    )  # fmt: skip
        pool.fleet.served(pool.fleet.members)
        return pool

    async def group(self, pool: RolloutPool, ticket: int) -> int:
        lengths = np.random.default_rng(ticket).lognormal(6.0, self.arguments.sigma, self.arguments.group).astype(np.int64)
        self.drawn[ticket] = lengths.clip(1, LONGEST)
        calls = [
            pool.generate(PROMPT, SamplingParams(max_tokens=int(length), seed=index), f"{ticket}-{index}", session=str(ticket))
            for index, length in enumerate(self.drawn[ticket])
        ]
        await asyncio.gather(*calls)
        return ticket

    async def stale(self, max_staleness: int) -> None:
        arguments, pool = self.arguments, self.pool()
        buffer = GroupBuffer(groups_per_step=arguments.groups, max_staleness=max_staleness, max_attempts=1)

        async def produce() -> None:
            while True:
                ticket = await buffer.reserve()
                await self.group(pool, ticket)
                buffer.fill(ticket, Group(prompt=_prompt(ticket), samples=()))

        tasks = [asyncio.create_task(produce()) for _ in range(buffer.capacity)]
        for _ in range(arguments.steps):
            self.trained += [group.prompt.index for group in await buffer.take(arguments.groups)]
            await asyncio.sleep(arguments.update)
            buffer.release(arguments.groups)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def first_finished(self, factor: float) -> None:
        arguments, pool = self.arguments, self.pool()
        num_started = int(arguments.groups * factor)
        for step in range(arguments.steps):
            tasks = [asyncio.create_task(self.group(pool, step * num_started + index)) for index in range(num_started)]
            for number, done in enumerate(asyncio.as_completed(tasks), start=1):
                self.trained.append(await done)
                if number == arguments.groups:
                    break
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(arguments.update)


def _prompt(index: int) -> Prompt:
    return Prompt(index=index, token_ids=PROMPT, text="", data_source="", ground_truth="")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--servers", type=int, default=8)
    parser.add_argument("--running", type=int, default=32)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--update", type=float, default=600.0, help="time of an update and push")
    arguments = parser.parse_args()
    ways = {f"staleness {k}": (lambda steps, k=k: steps.stale(k)) for k in (0, 1, 2, 4)}
    ways["first finished of 1.5"] = lambda steps: steps.first_finished(1.5)
    print("way                     time per step   ratio  unused   trained length   drawn length")
    base = None
    for name, way in ways.items():
        steps = Steps(arguments=arguments)
        steps.play(way(steps))
        trained = np.concatenate([steps.drawn[ticket] for ticket in steps.trained])
        drawn = np.concatenate(list(steps.drawn.values()))
        per_step = steps.seconds / arguments.steps
        base = per_step if base is None else base
        busy = trained.sum() / (steps.seconds * arguments.servers * arguments.running)
        print(f"{name:23} {per_step:13.0f}  {per_step / base:6.2f}  {1 - busy:7.1%}  {trained.mean():15.0f}  {drawn.mean():13.0f}")


if __name__ == "__main__":
    main()
