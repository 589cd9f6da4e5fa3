"""A rollout engine inside this process, without a model: every token is drawn uniformly from the vocabulary.

A token is a function of (prompt_ids, seed, weight version, position), its log-prob is -log(vocab_size). Weight pushes are received and
verified as by a real engine.
"""

import asyncio
import hashlib
import math
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial

import numpy as np
import torch

from moerl.hangs.watched import WatchedProcess
from moerl.rollout.server.contract import Core, runs_of
from moerl.rollout.server.limits import Limits
from moerl.rollout.server.server_state import ServerState
from moerl.types.completion import Completion, FinishReason, SamplingParams, ServerLoad
from moerl.types.errors import EngineError, EngineUnavailable, WeightError
from moerl.types.push import Manifest, Needs, TensorSpec, TransportOffer
from moerl.weights.installation import Loader
from moerl.weights.push_calls import in_thread
from moerl.weights.verify.places import Place, Start, copy_into
from moerl.weights.weight_session import WeightSession


class FakeEngine(ServerState):
    """Implements RolloutEngine: states of a server that has no process before it."""

    def __init__(self, name: str, *, limits: Limits, expected: Mapping[str, TensorSpec], max_running: int):
        """`expected`: the tensors a push must bring, by name."""
        self.name = name
        self.hosts: tuple[str, ...] = ("127.0.0.1",)
        self._limits = limits
        self._dead = asyncio.Event()
        self._new_core = partial(FakeCore, limits, expected)
        super().__init__(self._new_core(), max_running=max_running)
        self._is_open = False

    async def start(self) -> None:
        self._dead.clear()
        self.open(self._new_core())

    async def ended(self) -> EngineUnavailable:
        await self._dead.wait()
        return EngineUnavailable(f"{self.name}: the server ended")

    @property
    def watched(self) -> tuple[WatchedProcess, ...]:
        return (WatchedProcess(name=f"server {self.name}", node=socket.gethostname()),)

    def kill(self) -> None:
        self._shut("the server ended")
        self._dead.set()

    async def generate(self, prompt_ids: tuple[int, ...], sampling: SamplingParams, request_id: str) -> Completion:
        if violation := self._limits.violation(prompt_ids, sampling):
            raise EngineError(f"{self.name}: {request_id}: {violation}")
        with self._named():
            return await super().generate(prompt_ids, sampling, request_id)

    @asynccontextmanager
    async def _command(self) -> AsyncIterator[None]:
        with self._named():
            async with super()._command():
                yield

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Errors inside begin with the engine's name, as a server's do once they have come over HTTP."""
        try:
            yield
        except (EngineError, WeightError) as error:
            raise type(error)(f"{self.name}: {error}") from error


class FakeCore(Core):
    """Draws one token of every request per turn of the event loop."""

    def __init__(self, limits: Limits, expected: Mapping[str, TensorSpec]):
        self.tensors: dict[str, torch.Tensor] = {}
        """Tensors that pushes installed."""
        self.version: int | None = None
        self._limits, self._expected = limits, expected
        self._session = WeightSession(expected, Loader(load=self._load), read=lambda name: self.tensors[name])
        self._in_flight: set[str] = set()
        self._is_held = False
        self._changed = asyncio.Condition()

    async def generate(self, key: str, prompt_ids: list[int], sampling: SamplingParams, salt: str) -> Completion:
        self._in_flight.add(key)
        tokens: list[int] = []
        versions: list[int] = []
        stopped = False
        while not stopped and len(tokens) < sampling.max_tokens:
            await asyncio.sleep(0)
            async with self._changed:
                await self._changed.wait_for(lambda: not self._is_held or key not in self._in_flight)
            if key not in self._in_flight:
                break
            assert self.version is not None
            tokens.append(self._draw(prompt_ids, sampling, len(tokens), self.version))
            versions.append(self.version)
            stopped = tokens[-1] in sampling.stop_token_ids
        reason: FinishReason = "abort" if key not in self._in_flight else "stop" if stopped else "length"
        self._in_flight.discard(key)
        return Completion(
            request_id=key,
            token_ids=tuple(tokens),
            logprobs=(-math.log(self._limits.vocab_size),) * len(tokens),
            spans=runs_of(versions),
            finish_reason=reason,
            routes=self._routes([*prompt_ids, *tokens][:-1]) if sampling.returns_routes and tokens else None,
        )

    async def abort(self, key: str) -> None:
        async with self._changed:
            self._in_flight.discard(key)
            self._changed.notify_all()

    def load(self) -> ServerLoad:
        """It has no cache."""
        return ServerLoad()

    async def hold(self) -> None:
        self._is_held = True

    async def release(self) -> None:
        async with self._changed:
            self._is_held = False
            self._changed.notify_all()

    async def needs(self) -> Needs:
        return (self._session.needs,)

    async def connect(self, offer: TransportOffer) -> None:
        await in_thread(self._session.connect, offer)

    async def begin(self, manifest: Manifest) -> None:
        await in_thread(self._session.begin, manifest)

    async def install(self) -> None:
        await in_thread(self._session.install)

    async def finish(self, version: int) -> None:
        await in_thread(self._session.finish, version)
        self.version = version

    def close(self) -> None:
        self._session.close()

    def _draw(self, prompt_ids: list[int], sampling: SamplingParams, position: int, version: int) -> int:
        seed = None if sampling.temperature == 0 else sampling.seed
        first = len(prompt_ids) - sampling.num_drawn
        generator = _generator(tuple(prompt_ids[:first]), seed, version, sampling.num_drawn + position)
        return int(generator.integers(self._limits.vocab_size))

    def _routes(self, computed: list[int]) -> np.ndarray:
        """Routes of each token: a function of it and of its position."""
        shape = self._limits.routes
        assert shape is not None, "limits refuse the request"
        drawn = [
            [_generator(position, token, layer).permutation(shape.num_experts)[: shape.top_k] for layer in range(shape.num_layers)]
            for position, token in enumerate(computed)
        ]
        return np.array(drawn, dtype=shape.dtype)

    def _load(self, name: str, start: Start, piece: torch.Tensor) -> list[Place]:
        if name not in self.tensors:
            self.tensors[name] = torch.empty(self._expected[name].shape, dtype=piece.dtype)
        return copy_into(self.tensors[name], start, piece)


def _generator(*key: object) -> np.random.Generator:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest)))
