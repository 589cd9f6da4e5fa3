"""The rollout pool's makespan against list schedules of the same times, what keeping sessions together saves, and the driver's CPU.

    python benchmarks/pool.py --requests 2000 --servers 8 --running 32

Times are lognormal, so that the longest takes some twenty times the median. Makespans are of the real pool over servers that only wait, on
an event loop whose clock jumps to the next event, so they are exact. in order: every slot of every server takes the next request as soon as
it is free. longest first: the same with the times known before, which no pool can. bound: the mean work of a slot, or the longest request.
CPU is process time of the driver per request: of the pool alone, and with real HTTP servers (other processes) that answer with tokens.
"""

import argparse
import asyncio
import heapq
import selectors
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
from canned_servers import ID, Connected, canned_servers

from moerl.rollout.fleet.collector import Intake, LocalCollector
from moerl.rollout.fleet.rollout_pool import RolloutPool
from moerl.rollout.server import wire
from moerl.types.completion import Completion, SamplingParams, VersionSpan
from moerl.types.stored import Here

VOCAB = 150_000
PROMPT = tuple(range(200))


class JumpingClock(asyncio.SelectorEventLoop):
    """Its time is that of the next event as soon as nothing else is to be done."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Jumps(self))

    def time(self) -> float:
        return self._now


class _Jumps(selectors.SelectSelector):
    def __init__(self, loop: JumpingClock):
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout:
            self._loop._now += timeout
        return super().select(0)


class Waiting:
    """A server with `num_slots`; a request of n tokens takes n units of time, and each way over the network `latency`."""

    def __init__(self, name: str, num_slots: int, latency: float):
        self.name, self._latency, self._slots = name, latency, asyncio.Semaphore(num_slots)
        self.sessions: Counter[str] = Counter()

    async def generate(self, prompt_ids: tuple[int, ...], sampling: SamplingParams, request_id: str) -> Completion:
        self.sessions[request_id.split("-")[0]] += 1
        await asyncio.sleep(self._latency)
        async with self._slots:
            await asyncio.sleep(sampling.max_tokens)
        await asyncio.sleep(self._latency)
        return canned(request_id, sampling.max_tokens)


LONGEST = 200_000
TOKENS = tuple(range(100_000, 100_000 + 50_000)) * (LONGEST // 50_000)
LOGPROBS = tuple(np.linspace(-3.1415926, -0.1, LONGEST).tolist())


def canned(request_id: str, num_tokens: int) -> Completion:
    return Completion(
        request_id=request_id,
        token_ids=TOKENS[:num_tokens],
        logprobs=LOGPROBS[:num_tokens],
        spans=(VersionSpan(version=1, num_tokens=num_tokens),),
        finish_reason="length",
    )


class NoText:
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return ""


def collector() -> LocalCollector:
    """Completions end here: what is measured is the pool, and the driver where it receives them itself."""
    return LocalCollector(Intake(vocab_size=VOCAB, decoder=NoText()), keep=Here)


def list_schedule(times: Sequence[float], num_slots: int) -> float:
    """Makespan when each slot takes the next of `times` as soon as it is free."""
    slots = [0.0] * num_slots
    for taken in times:
        heapq.heapreplace(slots, slots[0] + taken)
    return max(slots)


async def generate_all(pool: RolloutPool, tokens: Sequence[int], group_size: int, *, sticky: bool) -> None:
    async def one(index: int, num_tokens: int) -> None:
        session = str(index // group_size)
        sampling = SamplingParams(max_tokens=num_tokens, seed=index)
        await pool.generate(PROMPT, sampling, f"{session}-{index}", session=session if sticky else None)

    pool.fleet.served(pool.fleet.members)
    await asyncio.gather(*(one(index, int(num_tokens)) for index, num_tokens in enumerate(tokens)))


def simulate(arguments: argparse.Namespace, tokens: np.ndarray, *, queued: int, sticky: bool) -> tuple[float, float, float]:
    """Makespan, share of requests that found an earlier one of their session on their server, CPU seconds per request."""
    with asyncio.Runner(loop_factory=JumpingClock) as runner:

        async def scenario() -> tuple[float, float]:
            engines = [Waiting(f"server-{index}", arguments.running, arguments.latency) for index in range(arguments.servers)]
            pool = RolloutPool(
        engines,  # type: ignore[arg-type]
        max_running=arguments.running, max_queued=queued, collector=collector(), request_seconds=1e9,
    )  # fmt: skip
            await generate_all(pool, tokens, arguments.group, sticky=sticky)
            prompts = sum(len(engine.sessions) for engine in engines)
            return asyncio.get_running_loop().time(), 1 - prompts / len(tokens)

        start = time.process_time()
        makespan, hits = runner.run(scenario())
        return makespan, hits, (time.process_time() - start) / len(tokens)


# -- the driver's CPU with HTTP ----------------------------------------------------------------------------------


async def http_seconds(engines: list[Connected], arguments: argparse.Namespace, num_tokens: int) -> float:
    pool = RolloutPool(engines, max_running=arguments.running, max_queued=2, collector=collector(), request_seconds=1e9)
    for engine in engines:
        await engine.start()
    start = time.process_time()
    await generate_all(pool, [num_tokens] * arguments.requests, arguments.group, sticky=True)
    seconds = time.process_time() - start
    for engine in engines:
        await engine.close()
    return seconds / arguments.requests


def measure_http(arguments: argparse.Namespace, num_tokens: int) -> float:
    with canned_servers(wire.dump_completion(canned(ID, num_tokens)), num_running=arguments.running, seconds=0.1) as engines:
        return asyncio.run(http_seconds(engines, arguments, num_tokens))


def print_makespans(arguments: argparse.Namespace, sigma: float) -> None:
    tokens = np.random.default_rng(arguments.seed).lognormal(6.0, sigma, arguments.requests).astype(np.int64).clip(1, LONGEST)
    num_slots = arguments.servers * arguments.running
    latency = 2 * arguments.latency
    in_order = list_schedule((tokens + latency).tolist(), num_slots)
    longest_first = list_schedule(sorted((tokens + latency).tolist(), reverse=True), num_slots)
    bound = max(tokens.sum() / num_slots, tokens.max())
    print(f"\nsigma {sigma}: mean {tokens.mean():.0f}, longest {tokens.max()}; bound {bound:.0f}")
    print("pool                      makespan  / in order  / longest first  / bound  prefix hits  CPU ms per request")
    ways = [("queued 0", 0, True), ("queued 2", 2, True), ("queued 2, no sessions", 2, False), ("queued 8", 8, True)]
    ways.append(("everything at once", len(tokens), False))
    for name, queued, sticky in ways:
        makespan, hits, seconds = simulate(arguments, tokens, queued=queued, sticky=sticky)
        print(
            f"{name:25} {makespan:8.0f}  {makespan / in_order:10.3f}  {makespan / longest_first:15.3f}  {makespan / bound:7.3f}"
            f"  {hits:11.1%}  {seconds * 1e3:18.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--servers", type=int, default=8)
    parser.add_argument("--running", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--latency", type=float, default=1.0, help="of the network, one way, in the time of a token")
    parser.add_argument("--tokens", type=int, nargs="*", default=[500, 4000], help="of the answers over HTTP")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(f"{arguments.requests} requests in groups of {arguments.group}, {arguments.servers} servers with {arguments.running} slots")
    for sigma in (0.7, 1.0, 1.3):
        print_makespans(arguments, sigma)
    for num_tokens in arguments.tokens:
        print(f"\nHTTP, {num_tokens} tokens: {measure_http(arguments, num_tokens) * 1e3:.3f} ms of the driver's CPU per request")


if __name__ == "__main__":
    main()
