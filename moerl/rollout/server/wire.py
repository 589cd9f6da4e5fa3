"""HTTP between the driver and a rollout server.

The arguments of a verb, by name, are the JSON of its request, and what it returns is that of the answer, with the types that the contract
gives them. A completion (server/messages.py) is one line of JSON, and after it the bytes of its arrays, little-endian: token ids (int32),
log-probs (float32), its routes, if it has any (tokens * layers * top_k of uint8 or uint16), and the entries its tokens were chosen from, if
it brings them: how many for each token (int32), then all of them (int32).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_type_hints

import numpy as np
from pydantic import BaseModel, Field, NonNegativeInt, TypeAdapter, create_model

from moerl.rollout.server.contract import RolloutEngine
from moerl.types.completion import Completion, DraftCounts, FinishReason, SamplingParams, ServerLoad, VersionSpan
from moerl.types.kept_vocabulary import KeptVocabulary
from moerl.types.push import Manifest, TransportOffer

UNAVAILABLE = 503
"""Status of an answer that is EngineUnavailable on the driver."""


MAX_ID = 256
"""Characters of a request's name."""

_MAX_ROUTE_BYTES = 2**13
"""Size of a token's routes: 128 layers with experts, 32 of them for a token, two bytes each."""

_MAX_VOCABULARY = 2**19

STRANGER = 401
"""Status of the answer to a request without the secret of the server's run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A completion to be made."""

    request_id: Annotated[str, Field(max_length=MAX_ID)]
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams


_Size = Annotated[NonNegativeInt, Field(lt=2**31)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionHead:
    """A Completion but for its arrays."""

    request_id: str
    num_tokens: NonNegativeInt
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    routes_shape: tuple[_Size, _Size, _Size] | None = None
    routes_dtype: Literal["uint8", "uint16"] = "uint8"
    num_entries: Annotated[NonNegativeInt, Field(lt=2**40)] | None = None
    """Entries that its tokens were chosen from, of all tokens together."""
    drafts: DraftCounts = field(default=DraftCounts())
    load: ServerLoad = field(default=ServerLoad())


MAX_ERROR = 2**20
"""Bytes of the longest error: a push's, which names tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBody:
    """Reason that goes with every status but 200, and those of addresses that are no verb (404, 405: plain text): 400 the request is wrong,
    401 it is not the run's, 409 the server's state forbids it, 413 its body is too large, 500 a bug, 503 the engine has ended."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyLine:
    """Line that a server writes to its stdout: where it serves, or why it cannot. Before that, of a server of several nodes, that
    this one's process is about to meet the others; it is all that nodes after the first write."""

    port: int | None = None
    error: str = ""
    arrived: bool = False


COMPLETION_HEAD = TypeAdapter(CompletionHead)
OFFER = TypeAdapter(TransportOffer)
MANIFEST = TypeAdapter(Manifest)
ERROR = TypeAdapter(ErrorBody)
READY = TypeAdapter(ReadyLine)


class Verb:
    """A method of the contract, as it crosses HTTP."""

    def __init__(self, path: str, method: Callable[..., Any]):
        fields = get_type_hints(method)
        answer = fields.pop("return")
        self.path, self.name = path, method.__name__
        self.http = "GET" if not fields and answer is not type(None) else "POST"
        self.answer: TypeAdapter[Any] = TypeAdapter(answer)
        self._body: type[BaseModel] = create_model(self.name, **{name: (kind, ...) for name, kind in fields.items()})  # type: ignore[call-overload]
        self._bodies = TypeAdapter(self._body)
        self._manifest: Manifest | None = None
        self._manifest_body = b""

    @property
    def is_of_push(self) -> bool:
        return self.path.startswith("/weights/")

    @property
    def max_answer(self) -> int:
        """Bytes of an answer, or of an error. The names of every tensor, once for each process, are the longest."""
        return 2**28 if self.name == "needs" else MAX_ERROR

    def dump(self, arguments: Mapping[str, Any]) -> bytes:
        """A body. That of a manifest, which a push tells to every server, is made once."""
        manifest = arguments.get("manifest")
        if manifest is None:
            return self._bodies.dump_json(self._body.model_construct(**arguments))
        if self._manifest is not manifest:
            self._manifest, self._manifest_body = manifest, self._bodies.dump_json(self._body.model_construct(**arguments))
        return self._manifest_body

    def parse(self, content: bytes) -> dict[str, Any]:
        """Arguments by name. pydantic.ValidationError with all that is wrong in them."""
        return dict(self._bodies.validate_json(content or b"{}"))


_METHODS: dict[str, Callable[..., Any]] = {
    "/abort": RolloutEngine.abort,
    "/pause": RolloutEngine.pause,
    "/resume": RolloutEngine.resume,
    "/sleep": RolloutEngine.sleep,
    "/wake": RolloutEngine.wake,
    "/health": RolloutEngine.health,
    "/weights/needs": RolloutEngine.needs,
    "/weights/connect": RolloutEngine.connect,
    "/weights/begin": RolloutEngine.begin,
    "/weights/install": RolloutEngine.install,
    "/weights/finish": RolloutEngine.finish,
}
VERBS = {method.__name__: Verb(path, method) for path, method in _METHODS.items()}
"""Verbs by name; ServerState's method of that name answers."""


def max_completion(num_prompt: int, sampling: SamplingParams) -> int:
    """Bytes that the answer to such a request has at most: for each token id, log-prob and a span of its own; its routes; the rest."""
    routes = _MAX_ROUTE_BYTES * (num_prompt + sampling.max_tokens) if sampling.returns_routes else 0
    entries = (sampling.top_k or _MAX_VOCABULARY) + 1 if sampling.filtered else 0
    return MAX_ERROR + 264 * sampling.max_tokens + routes + 4 * entries * sampling.max_tokens


def dump_completion(completion: Completion) -> bytes:
    routes, about = completion.routes, {}  # type: tuple[np.ndarray | None, dict[str, Any]]
    if routes is not None:
        about = {"routes_shape": routes.shape, "routes_dtype": str(routes.dtype)}
    if completion.sets is not None:
        about["num_entries"] = len(completion.sets.ids)
    head = CompletionHead(
        request_id=completion.request_id,
        num_tokens=len(completion.token_ids),
        spans=completion.spans,
        finish_reason=completion.finish_reason,
        drafts=completion.drafts,
        load=completion.load,
        **about,
    )
    tokens, logprobs = np.array(completion.token_ids, dtype="<i4"), np.array(completion.logprobs, dtype="<f4")
    # The JSON has no line break of its own: it is written without indentation, and strings escape theirs.
    parts = [COMPLETION_HEAD.dump_json(head), b"\n", tokens.tobytes(), logprobs.tobytes()]
    if routes is not None:
        parts.append(routes.tobytes())
    if completion.sets is not None:
        parts += [completion.sets.counts.astype("<i4").tobytes(), completion.sets.ids.astype("<i4").tobytes()]
    return b"".join(parts)


def parse_completion(content: bytes | bytearray) -> Completion:
    """ValueError if it is damaged. Routes and entries are views of `content`."""
    end = content.find(b"\n") if b"\n" in content else len(content)
    head, tail = COMPLETION_HEAD.validate_json(content[:end]), memoryview(content)[end + 1 :]
    tokens_bytes, dtype = 4 * head.num_tokens, np.dtype(head.routes_dtype)
    routes_bytes = 0 if head.routes_shape is None else math.prod(head.routes_shape) * dtype.itemsize
    sets_bytes = 0 if head.num_entries is None else tokens_bytes + 4 * head.num_entries
    if len(tail) != 2 * tokens_bytes + routes_bytes + sets_bytes:
        entries = "" if head.num_entries is None else f" and {head.num_entries} entries"
        expected = 2 * tokens_bytes + routes_bytes + sets_bytes
        rule = f"{expected} for {head.num_tokens} tokens and routes {head.routes_dtype} {head.routes_shape}{entries}"
        raise ValueError(f"{len(tail)} bytes of arrays, must be {rule}")
    routes = sets = None
    if head.routes_shape is not None:
        number = math.prod(head.routes_shape)
        routes = np.frombuffer(tail, dtype=dtype, count=number, offset=2 * tokens_bytes).reshape(head.routes_shape)
    if head.num_entries is not None:
        after = 2 * tokens_bytes + routes_bytes
        counts = np.frombuffer(tail, dtype="<i4", count=head.num_tokens, offset=after)
        if (counts < 0).any() or counts.sum() != head.num_entries:
            raise ValueError(f"counts of entries add up to {counts.sum()}, must be {head.num_entries}")
        sets = KeptVocabulary.of_counts(np.frombuffer(tail, dtype="<i4", offset=after + tokens_bytes), counts)
    return Completion(
        request_id=head.request_id,
        token_ids=tuple(np.frombuffer(tail, dtype="<i4", count=head.num_tokens).tolist()),
        logprobs=tuple(np.frombuffer(tail, dtype="<f4", count=head.num_tokens, offset=tokens_bytes).tolist()),
        spans=head.spans,
        finish_reason=head.finish_reason,
        routes=routes,
        sets=sets,
        drafts=head.drafts,
        load=head.load,
    )
