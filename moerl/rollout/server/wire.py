"""Bodies of HTTP between the driver and a rollout server: JSON of these dataclasses and of those in moerl.types.errors.

A completion is one line of JSON, and after it the bytes of its arrays, little-endian: token ids (int32), log-probs (float32), and its
routes, if it has any (tokens * layers * top_k of uint8 or uint16).
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import NonNegativeInt, TypeAdapter

from moerl.rollout.server.contract import EngineHealth, MemoryPart, PauseMode
from moerl.types.completion import Completion, FinishReason, SamplingParams, VersionSpan
from moerl.types.push import Manifest, Needs, TransportOffer

UNAVAILABLE = 503
"""Status of an answer that is EngineUnavailable on the driver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateBody:
    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionHead:
    """A Completion but for its arrays."""

    request_id: str
    num_tokens: NonNegativeInt
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    routes_shape: tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt] | None = None
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
    parts: tuple[MemoryPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedBody:
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishBody:
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBody:
    """Reason that goes with every status but 200: 400 the request is wrong, 409 the server's state forbids it, 500 a bug."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyLine:
    """Line that a server writes to its stdout: where it serves, or why it cannot. Before that, of a server of several nodes, that
    this one's process is about to meet the others; it is all that nodes after the first write."""

    port: int | None = None
    error: str = ""
    arrived: bool = False


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
FINISH = TypeAdapter(FinishBody)
ERROR = TypeAdapter(ErrorBody)
READY = TypeAdapter(ReadyLine)


def dump_completion(completion: Completion) -> bytes:
    routes, about = completion.routes, {}
    if routes is not None:
        about = {"routes_shape": routes.shape, "routes_dtype": str(routes.dtype)}
    head = CompletionHead(
        request_id=completion.request_id,
        num_tokens=len(completion.token_ids),
        spans=completion.spans,
        finish_reason=completion.finish_reason,
        **about,  # type: ignore[arg-type]
    )
    tokens, logprobs = np.array(completion.token_ids, dtype="<i4"), np.array(completion.logprobs, dtype="<f4")
    # The JSON has no line break of its own: it is written without indentation, and strings escape theirs.
    parts = [COMPLETION_HEAD.dump_json(head), b"\n", tokens.tobytes(), logprobs.tobytes()]
    return b"".join([*parts, b"" if routes is None else routes.tobytes()])


def parse_completion(content: bytes) -> Completion:
    """ValueError if it is damaged."""
    text, _, tail = content.partition(b"\n")
    head = COMPLETION_HEAD.validate_json(text)
    tokens_bytes, dtype = 4 * head.num_tokens, np.dtype(head.routes_dtype)
    routes_bytes = 0 if head.routes_shape is None else math.prod(head.routes_shape) * dtype.itemsize
    if len(tail) != 2 * tokens_bytes + routes_bytes:
        rule = f"{2 * tokens_bytes + routes_bytes} for {head.num_tokens} tokens and routes {head.routes_dtype} {head.routes_shape}"
        raise ValueError(f"{len(tail)} bytes of arrays, must be {rule}")
    routes = None if head.routes_shape is None else np.frombuffer(tail, dtype=dtype, offset=2 * tokens_bytes).reshape(head.routes_shape)
    return Completion(
        request_id=head.request_id,
        token_ids=tuple(np.frombuffer(tail, dtype="<i4", count=head.num_tokens).tolist()),
        logprobs=tuple(np.frombuffer(tail, dtype="<f4", count=head.num_tokens, offset=tokens_bytes).tolist()),
        spans=head.spans,
        finish_reason=head.finish_reason,
        routes=routes,
    )
