"""Ways not to wait for the longest completions of a step, against the synchronous run.

    python benchmarks/long_tail.py --steps 30

On the clock of benchmarks/pool.py: real pool and buffers, servers and trainer that only wait. staleness k: as the loop does with
max_staleness=k; in flight: with groups_in_flight; spare: with spare_groups, where groups that were put off have the lengths they had
before, or, with "anew", lengths drawn independently: the prompt says nothing about them. first finished: max_staleness=0, 1.5 times as many
groups are started, and those that are unfinished when enough are there are thrown away. unused: share of the slots' time that no completion
which trained took. lag: of trained groups, versions since they began; mean and most. Lengths are means.

    python benchmarks/long_tail.py --steps 8 --groups 64 --running 64 --servers 2 --caches 25000 40000 80000

prints after this table, for servers whose cache of keys and values holds so many tokens each (benchmarks/cached_server.py), the fixed
bound, max_running + 2, beside the one that follows the pressure, at several rollout.cache_high. preempted: times. computed again: tokens,
as a share of those of answers.
"""

import argparse
import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from cached_server import CachedServer
from pool import LONGEST, PROMPT, JumpingClock, Waiting, collector

from moerl.rollout.buffer import GroupBuffer
from moerl.rollout.fleet.rollout_pool import RolloutPool
from moerl.rollout.straggler_buffer import StragglerBuffer
from moerl.rollout.ticket_buffer import TicketBuffer
from moerl.types.completion import SamplingParams
from moerl.types.groups import Group, Prompt


@dataclass(kw_only=True)
class Steps:
    """`play` one way."""

    arguments: argparse.Namespace
    new_server: Callable[[str], Any]
    cache_high: float = 0.9
    servers: list[Any] = field(default_factory=list)
    seconds: float = 0.0
    draws_anew: bool = False
    drawn: dict[int, np.ndarray] = field(default_factory=dict)
    """Lengths, by group, as it was begun first."""
    last: dict[int, np.ndarray] = field(default_factory=dict)
    """As it was begun last."""
    began: dict[int, int] = field(default_factory=dict)
    """Version, by group."""
    version: int = 0
    num_begun: int = 0
    trained: list[int] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)

    def play(self, way: Coroutine[Any, Any, None]) -> "Steps":
        with asyncio.Runner(loop_factory=JumpingClock) as runner:
            runner.run(way)
            self.seconds = runner.get_loop().time()
        return self

    def pool(self) -> RolloutPool:
        arguments = self.arguments
        self.servers = [self.new_server(f"server-{index}") for index in range(arguments.servers)]
        pool = RolloutPool(
            self.servers, max_running=arguments.running, max_queued=2, collector=collector(), request_seconds=1e9,
            cache_high=self.cache_high,
        )  # fmt: skip
        pool.fleet.served(pool.fleet.members)
        return pool

    async def group(self, pool: RolloutPool, ticket: int) -> Group:
        self.num_begun += 1
        self.began[ticket] = self.version
        lengths = self.lengths(ticket, self.num_begun if self.draws_anew and ticket in self.drawn else 0)
        self.last[ticket] = lengths
        self.drawn.setdefault(ticket, lengths)
        calls = [
            pool.generate(PROMPT, SamplingParams(max_tokens=int(length), seed=index), f"{ticket}-{index}", session=str(ticket))
            for index, length in enumerate(lengths)
        ]
        await asyncio.gather(*calls)
        return Group(prompt=Prompt(index=ticket, token_ids=PROMPT, text="", data_source="", ground_truth=""), samples=())

    def lengths(self, ticket: int, attempt: int) -> np.ndarray:
        """int64 [G]. Without a share of the prompt lognormal(6, sigma), drawn from the ticket's seed alone."""
        arguments, seed = self.arguments, (ticket, attempt) if attempt else ticket
        mean = 6.0
        if arguments.prompt_share:
            mean += arguments.sigma * arguments.prompt_share**0.5 * np.random.default_rng((ticket, 0, 0)).standard_normal()
        sigma = arguments.sigma * (1 - arguments.prompt_share) ** 0.5
        return np.random.default_rng(seed).lognormal(mean, sigma, arguments.group).astype(np.int64).clip(1, LONGEST)

    def train(self, tickets: list[int]) -> None:
        self.trained += tickets
        self.lags += [self.version - self.began[ticket] for ticket in tickets]

    async def through(self, options: dict[str, Any]) -> None:
        """As moerl/loop.py does."""
        arguments, pool = self.arguments, self.pool()
        buffer = self.buffer(**options)

        async def produce() -> None:
            while True:
                ticket = await buffer.reserve()
                if (group := await buffer.unless_parked(ticket, self.group(pool, ticket))) is not None:
                    buffer.fill(ticket, group)

        tasks = [asyncio.create_task(produce()) for _ in range(buffer.capacity)]
        for _ in range(arguments.steps):
            self.train([group.prompt.index for group in await buffer.take(arguments.groups)])
            await asyncio.sleep(arguments.update)
            self.version += 1
            buffer.release(arguments.groups)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def buffer(self, *, stale: int, in_flight: int | None = None, spare: int = 0) -> TicketBuffer:
        options: dict[str, Any] = dict(groups_per_step=self.arguments.groups, max_staleness=stale, max_attempts=1)
        if spare:
            return StragglerBuffer(spare_groups=spare, num_steps=self.arguments.steps, **options)
        return GroupBuffer(num_slots=in_flight, **options)

    async def first_finished(self, factor: float) -> None:
        arguments, pool = self.arguments, self.pool()
        num_started = int(arguments.groups * factor)
        for step in range(arguments.steps):
            tasks = [asyncio.create_task(self.group(pool, step * num_started + index)) for index in range(num_started)]
            for number, done in enumerate(asyncio.as_completed(tasks), start=1):
                self.train([(await done).prompt.index])
                if number == arguments.groups:
                    break
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(arguments.update)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--servers", type=int, default=8)
    parser.add_argument("--running", type=int, default=32)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--prompt-share", type=float, default=0.0, help="of the variance of log lengths, what the prompt decides")
    parser.add_argument("--update", type=float, default=600.0, help="time of an update and push")
    parser.add_argument("--caches", type=int, nargs="*", default=[], help="tokens that a server's cache holds; the longest must fit")
    parser.add_argument("--prefill-rate", type=float, default=400.0, help="tokens computed again in the time of a token")
    arguments = parser.parse_args()
    print_ways(arguments)
    if arguments.caches:
        print_caches(arguments)


def print_ways(arguments: argparse.Namespace) -> None:
    print("way                            time per step  speedup  unused  mean lag  most  trained length   drawn length  begun")
    base = None
    for name, options, draws_anew in ways(arguments.groups):
        steps = Steps(
            arguments=arguments, draws_anew=draws_anew, new_server=lambda server: Waiting(server, arguments.running, 1.0)
        )  # fmt: skip
        steps.play(steps.through(options) if options else steps.first_finished(1.5))
        trained = np.concatenate([steps.last[ticket] for ticket in steps.trained])
        drawn = np.concatenate(list(steps.drawn.values()))
        per_step = steps.seconds / arguments.steps
        base = per_step if base is None else base
        busy = trained.sum() / (steps.seconds * arguments.servers * arguments.running)
        print(
            f"{name:30} {per_step:13.0f}  {base / per_step:7.2f}  {1 - busy:6.1%}  {np.mean(steps.lags):8.2f}  {max(steps.lags):4}"
            f"  {trained.mean():14.0f}  {drawn.mean():13.0f}  {steps.num_begun:5}"
        )


def print_caches(arguments: argparse.Namespace) -> None:
    print("way           cache   bound        time per step  / fixed  preempted  computed again")
    for stale in (0, 4):
        for tokens in arguments.caches:
            fixed = None
            for name, high in (("fixed", None), ("0.95", 0.95), ("0.9", 0.9), ("0.8", 0.8), ("0.7", 0.7)):
                steps = Steps(arguments=arguments, cache_high=high or 1.0, new_server=partial(cached, arguments, tokens, high is not None))
                steps.play(steps.through(dict(stale=stale)))
                fixed = steps.seconds if fixed is None else fixed
                again = sum(server.num_recomputed for server in steps.servers) / sum(server.num_answered for server in steps.servers)
                print(
                    f"staleness {stale}  {tokens:6}  {name:8} {steps.seconds / arguments.steps:15.0f}  {steps.seconds / fixed:7.3f}"
                    f"  {sum(server.num_preempted for server in steps.servers):9}  {again:14.1%}",
                    flush=True,
                )


def cached(arguments: argparse.Namespace, tokens: int, reports: bool, name: str) -> CachedServer:
    rate = arguments.prefill_rate
    return CachedServer(name, num_slots=arguments.running, cache_tokens=tokens, prefill_rate=rate, reports=reports)


def ways(groups: int) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Name, options of the buffer, whether groups that are begun anew have other lengths."""
    for stale in (0, 1, 2, 4):
        yield f"staleness {stale}", dict(stale=stale), False
    yield "first finished of 1.5", {}, False
    for stale, in_flight in ((1, groups * 3 // 2), (2, 2 * groups), (4, 2 * groups)):
        yield f"staleness {stale}, {in_flight} in flight", dict(stale=stale, in_flight=in_flight), False
    for stale in (0, 1):
        for spare in (groups // 8, groups // 4, groups // 2):
            yield f"staleness {stale}, {spare} spare", dict(stale=stale, spare=spare), False
    for stale in (0, 1):
        yield f"staleness {stale}, {groups // 4} spare, anew", dict(stale=stale, spare=groups // 4), True


if __name__ == "__main__":
    main()
