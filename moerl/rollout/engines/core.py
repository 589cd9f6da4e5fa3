"""What moerl's gate needs of an engine that runs in this process or below it."""

from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from moerl.push_types import Manifest, Needs, TransportOffer
from moerl.rollout.engine import Part
from moerl.types import FinishReason, SamplingParams, VersionSpan


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

    async def sleep(self, parts: tuple[Part, ...]) -> int:
        """As RolloutEngine.sleep, of parts that are awake; no request needs them then."""

    async def wake(self, parts: tuple[Part, ...]) -> int: ...

    def needs(self) -> Needs:
        """Of WeightReceiver."""

    async def connect(self, offer: TransportOffer) -> None: ...

    async def begin(self, manifest: Manifest) -> None: ...

    async def install(self) -> None: ...

    async def finish(self, version: int) -> None: ...

    def close(self) -> None:
        """End every process of the engine."""
