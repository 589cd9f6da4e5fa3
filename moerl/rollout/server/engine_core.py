"""Verbs that moerl's gate needs of an engine, which runs in this process or below it."""

from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from moerl.rollout.server.contract import MemoryPart
from moerl.types.completion import FinishReason, SamplingParams, VersionSpan
from moerl.types.push import Manifest, Needs, TransportOffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """A Completion without the id of the request."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    routes: np.ndarray | None = None


def engine_seed(seed: int) -> int:
    """Engines take 63 bits of the 128."""
    return (seed ^ seed >> 64) & (2**63 - 1)


def version_spans(spans: Iterable[tuple[str, int, int]]) -> tuple[VersionSpan, ...]:
    """`spans`: version, first token and the token after the last, as both engines report them; empty ones are left out."""
    return tuple(VersionSpan(version=int(version), num_tokens=end - start) for version, start, end in spans if end > start)


class Core(Protocol):
    """An engine. Called from one event loop; EngineError and WeightError with the engine's own reason."""

    def generate(self, key: str, prompt_ids: list[int], sampling: SamplingParams, salt: str) -> Awaitable[Sampled]:
        """`key` names the request for abort. What was cached for another `salt` must not be used."""

    async def abort(self, key: str) -> None:
        """Its generate returns soon, with what there is; while held, when that ends."""

    async def hold(self) -> None:
        """Requests stop where they are, with their cached keys and values."""

    async def release(self) -> None: ...

    async def sleep(self, parts: tuple[MemoryPart, ...]) -> int:
        """As RolloutEngine.sleep, of parts that are awake; no request needs them then."""

    async def wake(self, parts: tuple[MemoryPart, ...]) -> int: ...

    def needs(self) -> Needs:
        """As WeightReceiver's, and so the steps below. From `begin` to the end of `finish` the engine is held."""

    async def connect(self, offer: TransportOffer) -> None: ...

    async def begin(self, manifest: Manifest) -> None: ...

    async def install(self) -> None: ...

    async def finish(self, version: int) -> None: ...

    def close(self) -> None:
        """End every process of the engine, and every thread. Called from a thread that may wait."""
