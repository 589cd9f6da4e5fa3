"""A rollout engine inside this process, without a model: every token is drawn uniformly from the vocabulary.

A token is a function of (prompt_ids, seed, weight version, position), its log-prob is -log(vocab_size). Weight pushes are received and
verified as by a real engine.
"""

import asyncio
import hashlib
import math
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

import numpy as np
import torch

from moerl.hangs.watched import WatchedProcess
from moerl.rollout.server.asleep import push_refusal, sleep_refusal
from moerl.rollout.server.contract import PARTS, EngineHealth, EngineRefuses, MemoryPart, PauseMode
from moerl.rollout.server.limits import Limits
from moerl.types.completion import Completion, FinishReason, SamplingParams, VersionSpan
from moerl.types.errors import EngineError, EngineUnavailable, WeightError
from moerl.types.push import Manifest, Needs, TensorSpec, TransportOffer
from moerl.weights.in_thread import in_thread
from moerl.weights.receive import WeightSession


@dataclass(eq=False, slots=True, kw_only=True)
class _Request:
    """One completion in progress; `versions` says for each token with which weights it was drawn."""

    tokens: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    running: bool = False
    ended: Literal["", "abort", "error"] = ""
    reason: str = ""
    """Of an error."""


class FakeEngine:
    """Implements RolloutEngine. Draws one token of every running request per turn of the event loop."""

    def __init__(self, name: str, *, limits: Limits, expected: Mapping[str, TensorSpec], max_running: int):
        """`expected`: the tensors a push must bring, by name."""
        self.name = name
        self.hosts: tuple[str, ...] = ("127.0.0.1",)
        self.tensors: dict[str, torch.Tensor] = {}
        """What pushes installed."""
        self._limits = limits
        self._max_running = max_running
        self._requests: dict[str, _Request] = {}
        self._changed = asyncio.Condition()
        self._dead = asyncio.Event()
        self._version: int | None = None
        self._stale = "no weights were pushed yet"
        self._pushing = self._started = False
        self._asleep: set[MemoryPart] = set()
        self._paused: PauseMode | None = None
        self._num_pauses = 0
        self._session = WeightSession(expected, self._load, read=lambda name: self.tensors[name])

    async def start(self) -> None:
        self._dead.clear()
        self._version, self._stale, self._paused = None, "no weights were pushed yet", None
        self._pushing = False
        self._asleep.clear()
        self._started = True

    async def ended(self) -> EngineUnavailable:
        await self._dead.wait()
        return EngineUnavailable(f"{self.name}: the server ended")

    @property
    def parties(self) -> tuple[WatchedProcess, ...]:
        return (WatchedProcess(name=f"server {self.name}", node=socket.gethostname()),)

    def kill(self) -> None:
        self._started = False
        self._dead.set()

    async def die(self) -> None:
        """As by a signal: nothing is answered any more."""
        async with self._change():
            self._started = False
            self._end_all("the server ended")
        self._dead.set()

    async def generate(self, prompt_ids: tuple[int, ...], sampling: SamplingParams, request_id: str) -> Completion:
        self._refuse(prompt_ids, sampling, request_id)
        request = self._requests[request_id] = _Request()
        try:
            while not self._is_finished(request, sampling):
                await self._turn(request)
                if not request.ended:
                    self._draw(request, prompt_ids, sampling)
        finally:
            del self._requests[request_id]
            async with self._changed:
                self._changed.notify_all()
        if request.ended == "error":
            raise EngineUnavailable(f"{self.name}: {request_id}: {request.reason}")
        return self._completion(request, tuple(prompt_ids), sampling, request_id)

    async def abort(self, request_ids: tuple[str, ...] | None = None) -> None:
        async with self._change():
            ids = self._requests if request_ids is None else request_ids
            for request_id in ids:
                if request_id in self._requests:
                    self._requests[request_id].ended = "abort"

    async def pause(self, mode: PauseMode) -> None:
        async with self._change():
            self._require_start("pause")
            self._paused, self._num_pauses = mode, self._num_pauses + 1
            for request in self._requests.values():
                if mode == "abort" and request.running:
                    request.ended = "abort"
        if mode == "wait":
            await self._drain(self._num_pauses)

    async def resume(self) -> None:
        async with self._change():
            self._paused, self._num_pauses = None, self._num_pauses + 1

    async def sleep(self, parts: tuple[MemoryPart, ...] = PARTS) -> int:
        async with self._change():
            self._require_start("sleep")
            if reason := sleep_refusal(parts, self._num_running()):
                raise EngineError(f"{self.name}: {reason}")
            self._asleep |= set(parts)
        return 0

    async def wake(self, parts: tuple[MemoryPart, ...] = PARTS) -> int:
        async with self._change():
            self._require_start("wake")
            self._asleep -= set(parts)
        return 0

    async def health(self) -> EngineHealth:
        self._require_start("health")
        status: Literal["stale", "asleep", "paused", "healthy"] = (
            "stale" if self._stale else "asleep" if self._asleep else "paused" if self._paused else "healthy"
        )
        running = self._num_running()
        return EngineHealth(
            status=status,
            version=self._version,
            num_running=running,
            num_waiting=len(self._requests) - running,
            reason=self._stale,
            asleep=tuple(sorted(self._asleep)),
        )

    def receiver(self) -> "FakeReceiver":
        return FakeReceiver(self)

    async def close(self) -> None:
        async with self._change():
            self._started = False
            self._end_all("the server is shutting down")
        await asyncio.to_thread(self._session.close)

    # -- requests ----------------------------------------------------------------------------------------------

    def _refuse(self, prompt_ids: tuple[int, ...], sampling: SamplingParams, request_id: str) -> None:
        self._require_start("generate")
        reason = "the server is asleep; wake it first" if self._asleep else ""
        if self._stale and not (self._pushing and self._paused):
            reason = f"the server is stale: {self._stale}; push weights first"
        if reason:
            raise EngineRefuses(f"{self.name}: {request_id}: {reason}")
        if request_id in self._requests:
            reason = "is in flight already; ids must be unique on a server"
        reason = reason or self._limits.violation(prompt_ids, sampling)
        if reason:
            raise EngineError(f"{self.name}: {request_id}: {reason}")

    async def _turn(self, request: _Request) -> None:
        """Returns when the request may draw its next token, or has ended."""
        await asyncio.sleep(0)
        async with self._changed:
            await self._changed.wait_for(lambda: request.ended or self._may_draw(request))
            request.running = True

    def _may_draw(self, request: _Request) -> bool:
        if self._stale or self._asleep or self._paused in ("keep", "abort"):
            return False
        return request.running or (self._paused is None and self._num_running() < self._max_running)

    def _draw(self, request: _Request, prompt_ids: tuple[int, ...], sampling: SamplingParams) -> None:
        assert self._version is not None
        seed = None if sampling.temperature == 0 else sampling.seed
        first = len(prompt_ids) - sampling.num_drawn
        generator = _generator(tuple(prompt_ids[:first]), seed, self._version, sampling.num_drawn + len(request.tokens))
        request.tokens.append(int(generator.integers(self._limits.vocab_size)))
        request.versions.append(self._version)

    def _is_finished(self, request: _Request, sampling: SamplingParams) -> bool:
        stopped = bool(request.tokens) and request.tokens[-1] in sampling.stop_token_ids
        return bool(request.ended) or stopped or len(request.tokens) == sampling.max_tokens

    def _completion(self, request: _Request, prompt_ids: tuple[int, ...], sampling: SamplingParams, request_id: str) -> Completion:
        stopped = bool(request.tokens) and request.tokens[-1] in sampling.stop_token_ids
        reason: FinishReason = "abort" if request.ended else "stop" if stopped else "length"
        return Completion(
            request_id=request_id,
            token_ids=tuple(request.tokens),
            logprobs=(-math.log(self._limits.vocab_size),) * len(request.tokens),
            spans=tuple(VersionSpan(version=version, num_tokens=len(list(run))) for version, run in groupby(request.versions)),
            finish_reason=reason,
            routes=self._routes((*prompt_ids, *request.tokens)[:-1]) if sampling.returns_routes and request.tokens else None,
        )

    def _routes(self, computed: tuple[int, ...]) -> np.ndarray:
        """A token's are a function of it and of its position."""
        shape = self._limits.routes
        assert shape is not None, "limits refuse the request"
        drawn = [
            [_generator(position, token, layer).permutation(shape.num_experts)[: shape.top_k] for layer in range(shape.num_layers)]
            for position, token in enumerate(computed)
        ]
        return np.array(drawn, dtype=shape.dtype)

    # -- state -------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _change(self) -> AsyncIterator[None]:
        """Whatever waits looks again afterwards."""
        async with self._changed:
            yield
            self._changed.notify_all()

    async def _drain(self, number: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._num_running() == 0 or self._num_pauses != number)
        if self._num_pauses != number:
            raise EngineError(f"{self.name}: pause(wait) ended before its requests did, by another pause or resume")

    def _num_running(self) -> int:
        return sum(request.running and not request.ended for request in self._requests.values())

    def _end_all(self, reason: str) -> None:
        for request in self._requests.values():
            request.ended, request.reason = "error", reason

    def _require_start(self, action: str) -> None:
        if not self._started:
            raise EngineUnavailable(f"{self.name}: {action} on a server that is not running; start it first")

    def _load(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self.tensors[name] = tensor.clone()
        return self.tensors[name]


def _generator(*key: object) -> np.random.Generator:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest)))


class FakeReceiver:
    """Implements WeightReceiver on the engine's WeightSession, off the event loop."""

    def __init__(self, engine: FakeEngine):
        self._engine = engine

    async def needs(self) -> Needs:
        return (self._engine._session.needs,)

    async def connect(self, offer: TransportOffer) -> None:
        async with self._stale_on_error():
            await in_thread(self._engine._session.connect, offer)

    async def begin(self, manifest: Manifest) -> None:
        engine = self._engine
        if reason := push_refusal(engine._asleep):
            raise WeightError(f"{engine.name}: {reason}")
        async with self._stale_on_error():
            engine._stale = f"the push of version {manifest.version} is in progress"
            engine._pushing, engine._version = True, None
            await asyncio.to_thread(engine._session.begin, manifest)

    async def install(self) -> None:
        async with self._stale_on_error():
            await in_thread(self._engine._session.install)

    async def finish(self, version: int) -> None:
        engine = self._engine
        async with self._stale_on_error():
            await asyncio.to_thread(engine._session.finish, version)
        async with engine._change():
            engine._version, engine._stale, engine._pushing = version, "", False

    @asynccontextmanager
    async def _stale_on_error(self) -> AsyncIterator[None]:
        engine = self._engine
        try:
            yield
        except WeightError as error:
            async with engine._change():
                engine._stale, engine._version, engine._pushing = str(error), None, False
                engine._end_all(f"the server is stale: {error}")
            raise WeightError(f"{engine.name}: {error}") from error
