"""What goes over HTTP between the driver and a rollout server: JSON of these dataclasses and of those in moerl.types.

A completion is one line of JSON, and after it the bytes of its routes, if it has any: as many as tokens * layers * top_k, or twice that.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import TypeAdapter

from moerl.push_types import Bucket, Manifest, Needs, TransportOffer
from moerl.rollout.engine import EngineHealth, Part, PauseMode
from moerl.types import Completion, FinishReason, SamplingParams, VersionSpan

UNAVAILABLE = 503
"""Status of an answer that is EngineUnavailable on the driver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateBody:
    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionHead:
    """A Completion but for the bytes of its routes."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    routes_shape: tuple[int, int, int] | None = None
    routes_dtype: Literal["uint8", "uint16"] = "uint8"


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortBody:
    request_ids: tuple[str, ...] | None = None
    """None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseBody:
    mode: PauseMode


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsBody:
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedBody:
    num_bytes: int


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
COMPLETION_HEAD = TypeAdapter(CompletionHead)
ABORT = TypeAdapter(AbortBody)
PAUSE = TypeAdapter(PauseBody)
PARTS = TypeAdapter(PartsBody)
MOVED = TypeAdapter(MovedBody)
HEALTH = TypeAdapter(EngineHealth)
NEEDS = TypeAdapter(Needs)
OFFER = TypeAdapter(TransportOffer)
MANIFEST = TypeAdapter(Manifest)
BUCKET = TypeAdapter(Bucket)
FINISH = TypeAdapter(FinishBody)
ERROR = TypeAdapter(ErrorBody)
READY = TypeAdapter(ReadyLine)


def dump_completion(completion: Completion) -> bytes:
    routes, about = completion.routes, {}
    if routes is not None:
        about = {"routes_shape": routes.shape, "routes_dtype": str(routes.dtype)}
    head = CompletionHead(
        request_id=completion.request_id,
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        spans=completion.spans,
        finish_reason=completion.finish_reason,
        **about,  # type: ignore[arg-type]
    )
    # The JSON has no line break of its own: it is written without indentation, and strings escape theirs.
    return COMPLETION_HEAD.dump_json(head) + b"\n" + (b"" if routes is None else routes.tobytes())


def parse_completion(content: bytes) -> Completion:
    """ValueError if it is damaged."""
    text, _, tail = content.partition(b"\n")
    head = COMPLETION_HEAD.validate_json(text)
    dtype = np.dtype(head.routes_dtype)
    num_bytes = 0 if head.routes_shape is None else int(np.prod(head.routes_shape)) * dtype.itemsize
    if len(tail) != num_bytes:
        raise ValueError(f"{len(tail)} bytes of routes, must be {num_bytes} for {head.routes_dtype} {head.routes_shape}")
    return Completion(
        request_id=head.request_id,
        token_ids=head.token_ids,
        logprobs=head.logprobs,
        spans=head.spans,
        finish_reason=head.finish_reason,
        routes=None if head.routes_shape is None else np.frombuffer(tail, dtype=dtype).reshape(head.routes_shape),
    )
