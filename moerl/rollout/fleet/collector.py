"""Work on an engine's answer in the process that receives it, and who that process is.

It is checked, joined with what earlier parts of the request brought, decoded, and put where the trainer will find it; the pool gets a few
numbers.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from moerl.hangs.watched import WatchedProcess
from moerl.rollout.fleet.completion_check import check_completion, check_routes
from moerl.rollout.fleet.continuation import completed, joined, rest
from moerl.rollout.server.wire import GenerateRequest
from moerl.types.completion import Completion, ServerLoad
from moerl.types.routes import RouteShape
from moerl.types.stored import Payload, Stored, StoredCompletion

Keep = Callable[[Payload], Stored[Payload]]


class Decoder(Protocol):
    """The part of a tokenizer that turns tokens into the text rewards see."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A completion, or what a push left of it: then its finish reason is "abort"."""

    completion: StoredCompletion
    text: str
    """Empty while it is unfinished."""
    load: ServerLoad = field(default=ServerLoad(), compare=False)
    """Load of the server that sent it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """Work on an answer, wherever it arrives; picklable, since collectors in other processes get it."""

    vocab_size: int
    decoder: Decoder
    routes: RouteShape | None = None
    """Shape of the routes that completions bring if they are asked for."""

    async def received(
        self, more: Completion, request: GenerateRequest, so_far: Completion | None, *, server: str
    ) -> tuple[Completion, Payload]:
        """The whole, from `server`'s answer to what was missing of `request`. EngineUnsound for an answer that cannot be right."""
        prompt_ids, sampling = rest(request.prompt_ids, request.sampling, so_far)
        check = partial(check_completion, more, sampling, request_id=request.request_id, vocab_size=self.vocab_size, server=server)
        if more.sets is None:
            check()
        else:  # of large sets it takes a while, and other completions are arriving
            await asyncio.to_thread(check)
        if self.routes is not None and request.sampling.returns_routes and more.token_ids:
            # Of every part, since whoever sends the next one must not be blamed for it. In a thread: 0.5 ms per megabyte.
            await asyncio.to_thread(check_routes, more, num_prompt=len(prompt_ids), shape=self.routes)
        completion = completed(joined(so_far, more), request.sampling)
        is_finished = completion.finish_reason != "abort"
        text = self.decoder.decode(list(completion.token_ids), skip_special_tokens=True) if is_finished else ""
        return completion, Payload.of(request.prompt_ids, completion, text)


class Collector(Protocol):
    """Receiver of completions. Implementations: LocalCollector, moerl.rollout.fleet.ray_collectors.RayCollectors."""

    async def start(self) -> None:
        return

    async def ask(self, engine: Any, request: GenerateRequest, so_far: StoredCompletion | None) -> Answer:
        """Answer from `engine`, a RolloutEngine; raises what its `generate` does, and EngineUnsound for an answer that cannot be right."""

    @property
    def watched(self) -> tuple[WatchedProcess, ...]:
        """Its processes, for the report about a rollout that hangs."""
        return ()

    async def close(self) -> None:
        return


class LocalCollector(Collector):
    """This process: for engines that live in it, whose answers are here anyway, and for tests."""

    def __init__(self, intake: Intake, *, keep: Keep):
        """`keep`: moerl.types.stored.Here, or its `keep` where train ranks fetch payloads."""
        self._intake, self._keep = intake, keep

    async def ask(self, engine: Any, request: GenerateRequest, so_far: StoredCompletion | None) -> Answer:
        before = None if so_far is None else so_far.whole(so_far.payload.get())
        prompt_ids, sampling = rest(request.prompt_ids, request.sampling, before)
        more = await engine.generate(prompt_ids, sampling, request.request_id)
        completion, payload = await self._intake.received(more, request, before, server=engine.name)
        stored = StoredCompletion.of(completion, payload, self._keep(payload))
        return Answer(completion=stored, text=payload.text, load=more.load)
