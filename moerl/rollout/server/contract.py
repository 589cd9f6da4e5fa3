"""Verbs of every rollout server, whichever engine it runs, and those that ServerState needs of the engine. HTTPEngine and FakeEngine have
the first; tests/rollout/test_contract.py holds for each.

A server is STALE until a verified push and never serves then: `generate` raises EngineUnavailable, or waits if the server is paused, which
is how a push holds requests back. It is stale again once its weights were asleep: they are dropped, since a push brings all of them.
"""

from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal, Protocol, get_args

from moerl.hangs.watched import WatchedProcess
from moerl.types.completion import Completion, SamplingParams, ServerLoad, VersionSpan
from moerl.types.errors import EngineUnavailable
from moerl.weights.receiver_protocol import WeightReceiver, WeightSink

PauseMode = Literal["keep", "wait", "abort"]
"""keep: running requests stop where they are and go on after resume, on their cached keys and values. wait: running requests
finish first. abort: running requests return what they have, finish_reason "abort"."""


MemoryPart = Literal["weights", "cache"]
"""Parts of a server's memory on its GPUs. cache: keys and values, and recorded graphs, which hold on to them."""
PARTS: tuple[MemoryPart, ...] = get_args(MemoryPart)


Status = Literal["stale", "healthy", "paused", "asleep"]


class EngineRefuses(EngineUnavailable):
    """The server runs and says that it may not serve: it is stale, asleep or being closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    status: Status
    version: int | None
    """Version of the weights it serves; None before the first verified push."""
    num_running: int
    """Requests that the engine has."""
    num_waiting: int
    """Requests that wait for it to take them."""
    load: ServerLoad = field(default=ServerLoad())
    reason: str = ""
    """Why it is stale."""
    asleep: tuple[MemoryPart, ...] = ()


class RolloutEngine(WeightReceiver, Protocol):
    """One server. All methods are safe to call concurrently from one event loop."""

    name: str
    """host:port, or a label for an engine without a socket."""
    hosts: tuple[str, ...]
    """The addresses of its nodes."""

    @property
    def watched(self) -> tuple[WatchedProcess, ...]:
        """Its process on every node, for the report about one that hangs."""

    def kill(self) -> None:
        """End it at once and without a word, as a server that hangs is ended; `ended` tells of it."""

    async def start(self) -> None:
        """Returns when the server answers; raises EngineError with its last log lines if it dies first. After close it starts anew."""

    async def ended(self) -> EngineUnavailable:
        """Returns, with the reason, when the server has ended; never for an engine without a process of its own."""

    async def generate(self, prompt_ids: tuple[int, ...], sampling: SamplingParams, request_id: str) -> Completion:
        """Answer to a request. The older of two of one id in flight returns its tokens so far, with finish_reason "abort"."""

    async def abort(self, request_ids: tuple[str, ...] | None = None) -> None:
        """Stop these requests (None: all); their `generate` returns the tokens so far with finish_reason "abort"."""

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def sleep(self, parts: tuple[MemoryPart, ...] = PARTS) -> int:
        """Give the GPU's memory of these back; what is in it is lost, but for what no push would bring again. Weights go with the cache or
        after it. Returns bytes; 0 where nothing moves, or the engine does not say. EngineError while requests run that need the cache."""

    async def wake(self, parts: tuple[MemoryPart, ...] = PARTS) -> int:
        """Take the memory again; bytes. Without that of weights a server takes no push, and one that lacks any part no request."""

    async def health(self) -> EngineHealth: ...

    async def close(self) -> None:
        """End the server and wait for its exit; safe to call twice and before start."""


class Core(WeightSink, Protocol):
    """An engine under ServerState (server_state.py), which runs in this process or below it. Called from one event loop; EngineError and
    WeightError with the engine's own reason.

    ServerState keeps what waits, paused, asleep and stale: a core has at most the `max_running` requests it was started for, gets one
    command at a time beside `generate` and `abort`, and is held from `begin` to the end of `finish` and while parts of it sleep.
    """

    def generate(self, key: str, prompt_ids: list[int], sampling: SamplingParams, salt: str) -> Awaitable[Completion]:
        """`key` names the request for abort, and is the completion's request_id. What was cached for another `salt` must not be used."""

    async def abort(self, key: str) -> None:
        """Its generate returns soon, with what there is; while held, when that ends."""

    async def finish(self, version: int) -> None:
        """As WeightReceiver.finish; ServerState keeps the nonce."""

    def load(self) -> ServerLoad:
        """Pressure on its cache, as of its newest iterations; for every answer, so it asks no other process."""

    async def hold(self) -> None:
        """Requests stop where they are, with their cached keys and values."""

    async def release(self) -> None: ...

    async def sleep(self, parts: tuple[MemoryPart, ...]) -> int:
        """As RolloutEngine.sleep, of parts that are awake; no request needs them then, and none comes before a push if weights go."""
        return 0

    async def wake(self, parts: tuple[MemoryPart, ...]) -> int:
        return 0

    def close(self) -> None:
        """End every process of the engine, and every thread. Called from a thread that may wait."""


def engine_seed(seed: int) -> int:
    """Engines take 63 bits of the 128."""
    return (seed ^ seed >> 64) & (2**63 - 1)


def version_spans(spans: Iterable[tuple[str, int, int]]) -> tuple[VersionSpan, ...]:
    """`spans`: version, first token and the token after the last, as both engines report them; empty ones are left out."""
    return tuple(VersionSpan(version=int(version), num_tokens=end - start) for version, start, end in spans if end > start)


def runs_of(versions: Iterable[int]) -> tuple[VersionSpan, ...]:
    """Spans of tokens, from the version of each."""
    return tuple(VersionSpan(version=version, num_tokens=len(list(run))) for version, run in groupby(versions))
