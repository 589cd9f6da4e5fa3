"""Requests that go to a server together, and their answers, which come as they are ready: one exchange of HTTP for a whole group, or many.

A message is JSON: prompts, each once, and the requests, which name theirs. The answer is a stream of frames: the place of a request in the
message, a status and a length, little-endian, and as many bytes: with status 200 a completion (wire.dump_completion), else an ErrorBody.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, NonNegativeInt, TypeAdapter

from moerl.rollout.server import wire
from moerl.rollout.server.wire import GenerateRequest
from moerl.types.completion import SamplingParams

MAX_REQUESTS = 1024
"""Requests of a message, at most."""

MAX_TOKENS = 2**19
"""Tokens of a message's prompts, at most, unless it has one prompt alone."""

MORE_BYTES = 16 * MAX_TOKENS + 2**15 * MAX_REQUESTS
"""Bytes that a message may have more than one of a single request."""

PIECE_BYTES = 2**20
"""Bytes of an answer sent at a time, at most."""

_FRAME = struct.Struct("<IHQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    request_id: Annotated[str, Field(max_length=wire.MAX_ID)]
    prompt: NonNegativeInt
    """Its place among the prompts."""
    sampling: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    prompts: tuple[tuple[int, ...], ...]
    requests: Annotated[tuple[_Asked, ...], Field(min_length=1, max_length=MAX_REQUESTS)]


_MESSAGE = TypeAdapter(_Message)


def dump_requests(requests: Sequence[GenerateRequest]) -> bytes:
    """A message. Requests that hold the same prompt, as a group's do, send it once."""
    places: dict[int, int] = {}  # by identity: comparing thousands of tokens would cost more than sending them
    prompts: list[tuple[int, ...]] = []
    asked = []
    for request in requests:
        place = places.setdefault(id(request.prompt_ids), len(prompts))
        if place == len(prompts):
            prompts.append(request.prompt_ids)
        asked.append(_Asked(request_id=request.request_id, prompt=place, sampling=request.sampling))
    return _MESSAGE.dump_json(_Message(prompts=tuple(prompts), requests=tuple(asked)))


def parse_requests(content: bytes) -> tuple[GenerateRequest, ...]:
    """pydantic.ValidationError, or ValueError, with what is wrong. Requests with the same prompt hold the same tuple."""
    message = _MESSAGE.validate_json(content)
    last = max(asked.prompt for asked in message.requests)
    if last >= len(message.prompts):
        raise ValueError(f"prompt = {last}: must be below {len(message.prompts)}, the prompts of the message")
    return tuple(
        GenerateRequest(request_id=asked.request_id, prompt_ids=message.prompts[asked.prompt], sampling=asked.sampling)
        for asked in message.requests
    )


def messages_of(requests: Sequence[GenerateRequest], num_drawn: Sequence[int] = ()) -> Iterator[list[GenerateRequest]]:
    """In order, as many in each as a server takes. `num_drawn`: tokens that each has already, which go with its prompt, so that no other
    shares it; without: none."""
    message: list[GenerateRequest] = []
    num_tokens, seen = 0, set[int]()
    for request, drawn in zip(requests, num_drawn or [0] * len(requests), strict=True):
        whole = len(request.prompt_ids) + drawn
        more = 0 if not drawn and id(request.prompt_ids) in seen else whole
        if message and (len(message) == MAX_REQUESTS or num_tokens + more > MAX_TOKENS):
            yield message
            message, num_tokens, more = [], 0, whole
            seen.clear()
        message.append(request)
        if not drawn:
            seen.add(id(request.prompt_ids))
        num_tokens += more
    if message:
        yield message


def dump_frame(place: int, status: int, content: bytes) -> bytes:
    return _FRAME.pack(place, status, len(content)) + content


def pieces_of(frames: Sequence[bytes]) -> list[bytes | memoryview]:
    """At least one, of PIECE_BYTES at most: copies by HTTP and asyncio of megabytes at once cost several times as much. Small frames share
    one."""
    pieces: list[bytes | memoryview] = []
    small: list[bytes] = []
    for frame in frames:
        if small and sum(map(len, small)) + len(frame) > PIECE_BYTES:
            pieces.append(b"".join(small))
            small = []
        if len(frame) > PIECE_BYTES:
            pieces += [memoryview(frame)[at : at + PIECE_BYTES] for at in range(0, len(frame), PIECE_BYTES)]
        else:
            small.append(frame)
    return [*pieces, b"".join(small)] if small or not pieces else pieces


class Frames:
    """Frames of an answer, from its bytes as they come. Routes make megabytes of them: each byte is copied once, and memory is taken for
    those that came, whatever length a frame announces."""

    def __init__(self, bounds: Sequence[int]):
        """`bounds`: bytes of the answer to each request, at most."""
        self._bounds, self.missing = bounds, set(range(len(bounds)))
        """Places of those that have not come."""
        self._head, self._content = bytearray(), bytearray()
        self._length = 0  # of the content

    @property
    def unread(self) -> bytes:
        """First 200 bytes after the last frame that is whole."""
        return bytes(self._head + self._content[:200])[:200]

    def feed(self, chunk: bytes) -> Iterator[tuple[int, int, bytearray]]:
        """Place, status and content of each that is whole now. ValueError for one that nobody asked for, or that is too long."""
        left = memoryview(chunk)
        while left:
            if missing := _FRAME.size - len(self._head):
                self._head += left[:missing]
                left = left[missing:]
                if len(self._head) < _FRAME.size:
                    return
                self._length = self._announced()
            part = left[: self._length - len(self._content)]
            self._content += part
            left = left[len(part) :]
            if len(self._content) == self._length:
                yield self._taken()

    def _announced(self) -> int:
        """Bytes of the content, by its head."""
        place, _, length = _FRAME.unpack(self._head)
        if place not in self.missing:
            raise ValueError(f"an answer to request {place}, which waits for none")
        if length > self._bounds[place]:
            raise ValueError(f"an answer of {length} bytes, more than the {self._bounds[place]} that this request can have")
        return int(length)

    def _taken(self) -> tuple[int, int, bytearray]:
        place, status, _ = _FRAME.unpack(self._head)
        content, self._head, self._content = self._content, bytearray(), bytearray()
        self.missing.remove(place)
        return place, status, content
