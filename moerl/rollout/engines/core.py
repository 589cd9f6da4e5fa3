"""What moerl's gate needs of an engine that runs in this process or below it."""

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from moerl.push_types import Bucket, Manifest, Needs, TransportOffer
from moerl.types import FinishReason, SamplingParams, VersionSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """A Completion without the id of the request."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    routes: np.ndarray | None = None


class Core(Protocol):
    """An engine. Called from one event loop; EngineError and WeightError with the engine's own reason."""

    def generate(self, key: str, prompt_ids: list[int], sampling: SamplingParams, salt: str) -> Awaitable[Sampled]:
        """`key` names the request for abort. What was cached for another `salt` must not be used."""

    async def abort(self, key: str) -> None:
        """Its generate returns soon, with what there is; while held, when that ends."""

    async def hold(self) -> None:
        """Requests stop where they are, with their cached keys and values."""

    async def release(self) -> None: ...

    async def sleep(self) -> None:
        """Nothing runs then. No-op where there is no memory to give back."""

    async def wake(self) -> None: ...

    def needs(self) -> Needs:
        """Of WeightReceiver."""

    async def connect(self, offer: TransportOffer) -> None: ...

    async def begin(self, manifest: Manifest) -> None: ...

    async def install(self, bucket: Bucket) -> None: ...

    async def finish(self, version: int) -> None: ...

    def close(self) -> None:
        """End every process of the engine."""
