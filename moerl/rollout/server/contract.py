"""Verbs of every rollout server, whichever engine it runs. HTTPEngine and FakeEngine have them; tests/rollout/test_contract.py holds
for each.

A server is STALE until a verified push and never serves then: `generate` raises EngineUnavailable, or waits if the server is paused, which
is how a push holds requests back.
"""

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from moerl.hangs.watched import WatchedProcess
from moerl.types.completion import Completion, SamplingParams
from moerl.types.errors import EngineUnavailable
from moerl.weights.receiver import WeightReceiver

PauseMode = Literal["keep", "wait", "abort"]
"""keep: running requests stop where they are and go on after resume, on their cached keys and values. wait: running requests
finish first. abort: running requests return what they have, finish_reason "abort"."""


MemoryPart = Literal["weights", "cache"]
"""Parts of a server's memory on its GPUs. cache: keys and values, and recorded graphs, which hold on to them."""
PARTS: tuple[MemoryPart, ...] = get_args(MemoryPart)


class EngineRefuses(EngineUnavailable):
    """The server runs and says that it may not serve: it is stale, asleep or being closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    status: Literal["stale", "healthy", "paused", "asleep"]
    version: int | None
    """Version of the weights it serves; None before the first verified push."""
    num_running: int
    num_waiting: int
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

    async def generate(self, prompt_ids: tuple[int, ...], sampling: SamplingParams, request_id: str) -> Completion: ...

    async def abort(self, request_ids: tuple[str, ...] | None = None) -> None:
        """Stop these requests (None: all); their `generate` returns the tokens so far with finish_reason "abort"."""

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def sleep(self, parts: tuple[MemoryPart, ...] = PARTS) -> int:
        """Give the GPU's memory of these back; weights are kept in host memory, a cache is lost. Returns bytes; 0, and only the state
        changes, where the platform has nothing to give. EngineError while requests run that need the cache."""

    async def wake(self, parts: tuple[MemoryPart, ...] = PARTS) -> int:
        """Bytes taken again. A server without weights takes no push, and one that lacks any part no request."""

    async def health(self) -> EngineHealth: ...

    async def close(self) -> None:
        """End the server and wait for its exit; safe to call twice and before start."""
