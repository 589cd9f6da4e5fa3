"""Contents of a completion for every token, and where it is: in this process, or in Ray's object store.

The driver keeps `StoredCompletion`s: a few numbers and a reference. Who needs tokens, log-probs, routes or text fetches the payload.
Ray is imported where it is used: validation and unit tests run without.
"""

import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar, cast, runtime_checkable

import numpy as np

from moerl.types.completion import Completion, DraftCounts, FinishReason, VersionSpan
from moerl.types.errors import Origin, StoreError
from moerl.types.exit_codes import ExitCode
from moerl.types.kept_vocabulary import KeptVocabulary

Stream = Literal["rl", "ce", "kl"]
"""Components of a loss: what the objective makes of a token, its cross-entropy, its distance from a teacher."""

TOGETHER_BYTES = 2**18
"""Size of an object that holds several payloads, at most. A rank reads all of it for the sake of one of them."""

_OWNER = re.compile(r"owner address: (.+?):\d+\.")
"""Address of the process that had put an object into the store, in Ray's words about its loss."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """Everything of a completion that grows with its length; arrays that came out of the store are read-only."""

    prompt_ids: np.ndarray  # int32
    token_ids: np.ndarray  # int32, of the response: all that follows the prompt
    logprobs: np.ndarray  # float32, one for each of token_ids
    routes: np.ndarray | None  # see Completion.routes
    text: str
    """Text of the response; empty while it is unfinished."""
    mask: np.ndarray | None = None  # bool, one for each of token_ids: the policy produced it, not a tool or an environment; None: all
    sets: KeptVocabulary | None = None
    """Entries that each of token_ids was chosen from."""
    weights: Mapping[Stream, np.ndarray] = field(default_factory=dict)
    """float32, one for each of token_ids: of the component of the loss by its name. Without `rl` it is 1 where the policy produced the
    token; the others are 0."""

    @classmethod
    def of(cls, prompt_ids: Sequence[int], completion: Completion, text: str) -> "Payload":
        return cls(
            prompt_ids=np.array(prompt_ids, dtype=np.int32),
            token_ids=np.array(completion.token_ids, dtype=np.int32),
            logprobs=np.array(completion.logprobs, dtype=np.float32),
            routes=completion.routes,
            text=text,
            sets=completion.sets,
        )

    def packed(self) -> bytes:
        """The bytes of `unpacked`. To pickle an array takes seven times as long as its bytes."""
        arrays = (self.prompt_ids.tobytes(), self.token_ids.tobytes(), self.logprobs.tobytes())
        return pickle.dumps((*arrays, self.routes, self.text, self.mask, self.sets, dict(self.weights)), protocol=5)

    @classmethod
    def unpacked(cls, data: bytes) -> "Payload":
        prompt, tokens, logprobs, routes, text, mask, sets, weights = pickle.loads(data)
        return cls(
            prompt_ids=np.frombuffer(prompt, dtype=np.int32),
            token_ids=np.frombuffer(tokens, dtype=np.int32),
            logprobs=np.frombuffer(logprobs, dtype=np.float32),
            routes=routes,
            text=text,
            mask=mask,
            sets=sets,
            weights=weights,
        )

    @property
    def num_bytes(self) -> int:
        arrays = (self.prompt_ids, self.token_ids, self.logprobs, self.routes, self.mask, self.sets, *self.weights.values())
        return sum(array.nbytes for array in arrays if array is not None) + len(self.text)

    def observed(self) -> tuple[tuple[int, int], ...]:
        """(first, number) of each run of response tokens that the policy did not produce."""
        if self.mask is None or self.mask.all():
            return ()
        edges = np.flatnonzero(np.diff(np.concatenate([[True], self.mask, [True]]).astype(np.int8)))
        return tuple((int(first), int(end - first)) for first, end in zip(edges[::2], edges[1::2], strict=True))


@runtime_checkable
class Stored(Protocol[T_co]):
    """A value somewhere. Implementations: Here, InStore."""

    def get(self) -> T_co:
        """Waits until it is in this process, or on this machine."""


@dataclass(frozen=True, slots=True)
class Here(Generic[T]):
    """In this process; travels with whoever holds it."""

    value: T = field(repr=False)

    def get(self) -> T:
        return self.value


@dataclass(frozen=True, slots=True)
class InStore(Generic[T]):
    """In Ray's object store, until the last one who holds this, or what was kept together with it, lets go of it, or the process that put
    it there ends."""

    reference: Any
    """ray.ObjectRef of T; of a list of packed payloads where several were kept together."""
    place: int | None = None
    """Place in that list."""

    def get(self) -> T:
        return self.of(_get([self.reference])[0])

    def of(self, kept: Any) -> T:
        """The value, from what the reference is of."""
        return cast(T, kept if self.place is None else Payload.unpacked(kept[self.place]))


def keep_together(payloads: Sequence[Payload]) -> list[InStore[Payload]]:
    """Places of each in the object store: small ones share objects of up to TOGETHER_BYTES, since making an object costs as much as copying
    so many. StoreError as `keep`."""
    kept: list[InStore[Payload]] = []
    for together in _together(payloads):
        if len(together) == 1:
            kept.append(keep(together[0]))
        else:
            reference = keep([payload.packed() for payload in together]).reference
            kept += [InStore(reference, place) for place in range(len(together))]
    return kept


def _together(payloads: Sequence[Payload]) -> Iterator[list[Payload]]:
    """In order; more than one only if they have TOGETHER_BYTES at most."""
    together: list[Payload] = []
    num_bytes = 0
    for payload in payloads:
        num_bytes += payload.num_bytes
        if together and num_bytes > TOGETHER_BYTES:
            yield together
            together, num_bytes = [], payload.num_bytes
        together.append(payload)
    if together:
        yield together


def keep(value: T) -> InStore[T]:
    """Into the object store. StoreError if neither its memory nor the disk it spills to has room."""
    import ray

    try:
        return InStore(ray.put(value))
    except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
        raise StoreError(
            f"Ray's object store is full, and so is the disk it spills to: {error}\nIt holds the tokens and routes of every sample that is "
            "not trained yet; moerl check prints how much that can be. Start Ray with a larger --object-store-memory, free the disk "
            "under its --temp-dir, or lower groups_per_step, max_staleness or rollout.max_response_tokens"
        ) from error


def fetch(stored: Sequence[Stored[T]], *, seconds: float | None = None) -> list[T]:
    """In order; what is on other machines is fetched at the same time. `seconds`: StoreError after them; a node that stands still, and has
    the samples, would else be waited for without end."""
    references = list({each.reference: None for each in stored if isinstance(each, InStore)})
    fetched = dict(zip(references, _get(references, seconds), strict=True))
    return [each.of(fetched[each.reference]) if isinstance(each, InStore) else each.get() for each in stored]


def _get(references: Sequence[Any], seconds: float | None = None) -> list[Any]:
    if not references:
        return []
    import ray

    try:
        return list(ray.get(references, timeout=seconds))
    except ray.exceptions.GetTimeoutError as error:
        raise StoreError(f"samples did not come within {seconds:g} s: the node that has them stands still, or is not reached") from error
    except ray.exceptions.ObjectLostError as error:
        lost = StoreError(
            f"samples were lost with the process that had received them ({type(error).__name__})\nThe newest checkpoint has everything to "
            "go on from; the same command resumes"
        )
        owner = _OWNER.search(str(error))
        node = "?" if owner is None else owner[1]
        lost.origin = Origin(who="a process that receives completions", node=node, doing="", details=str(error))
        if not isinstance(error, ray.exceptions.ReferenceCountingAssertionError):  # which would be a bug: no process has ended
            lost.exit_code = ExitCode.KILLED
        raise lost from error


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCompletion:
    """Completion as the driver knows it: one of an engine, or a segment of several, with what tools and environments said between."""

    request_id: str
    num_tokens: int
    """Tokens of the response that the policy produced."""
    num_prompt: int
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    routes_bytes: int
    """0: it has none."""
    num_bytes: int
    """Bytes of the payload."""
    payload: Stored[Payload] = field(compare=False)
    observed: tuple[tuple[int, int], ...] = ()
    """(first, number) of each run of response tokens that the policy did not produce."""
    streams: frozenset[Stream] = frozenset()
    """Components of the loss that its payload has weights for."""
    drafts: DraftCounts = field(default=DraftCounts(), compare=False)
    met_push: bool = False
    """Its server got weights while it had the request: keys and values of the prompt may be of those before, whatever the spans say."""

    @property
    def num_observed(self) -> int:
        return sum(number for _, number in self.observed)

    @classmethod
    def of(cls, completion: Completion, payload: Payload, stored: Stored[Payload]) -> "StoredCompletion":
        observed = payload.observed()
        return cls(
            request_id=completion.request_id,
            observed=observed,
            streams=frozenset(payload.weights),
            num_tokens=len(payload.token_ids) - sum(number for _, number in observed),
            num_prompt=len(payload.prompt_ids),
            spans=completion.spans,
            finish_reason=completion.finish_reason,
            routes_bytes=0 if payload.routes is None else payload.routes.nbytes,
            num_bytes=payload.num_bytes,
            payload=stored,
            drafts=completion.drafts,
        )

    def whole(self, payload: Payload) -> Completion:
        """As the engine returned it, but for the precision of log-probs: float32."""
        return Completion(
            request_id=self.request_id,
            token_ids=tuple(payload.token_ids.tolist()),
            logprobs=tuple(payload.logprobs.tolist()),
            spans=self.spans,
            finish_reason=self.finish_reason,
            routes=payload.routes,
            sets=payload.sets,
            drafts=self.drafts,
        )
