"""What goes over HTTP between the driver and a rollout server: JSON of these dataclasses and of those in moerl.types."""

from dataclasses import dataclass

from pydantic import TypeAdapter

from moerl.rollout.engine import EngineHealth, PauseMode
from moerl.types import Bucket, Completion, Manifest, SamplingParams, TransportOffer


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateBody:
    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortBody:
    request_ids: tuple[str, ...] | None = None
    """None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseBody:
    mode: PauseMode


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishBody:
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBody:
    """With every status but 200: 400 the request is wrong, 409 the server's state forbids it, 500 a bug."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyLine:
    """The one line a server writes to its stdout: where it serves, or why it cannot."""

    port: int | None = None
    error: str = ""


GENERATE = TypeAdapter(GenerateBody)
COMPLETION = TypeAdapter(Completion)
ABORT = TypeAdapter(AbortBody)
PAUSE = TypeAdapter(PauseBody)
HEALTH = TypeAdapter(EngineHealth)
OFFER = TypeAdapter(TransportOffer)
MANIFEST = TypeAdapter(Manifest)
BUCKET = TypeAdapter(Bucket)
FINISH = TypeAdapter(FinishBody)
ERROR = TypeAdapter(ErrorBody)
READY = TypeAdapter(ReadyLine)
