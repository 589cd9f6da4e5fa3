"""The process that receives completions from rollout servers: checks them, and puts what grows with their length into the object store.

    driver --submit(message)--> this process --POST /generate--> server
    driver <-- answers() -----  (all that came since, a few ms after the first)  <--stream--

`answers` is asked again and again: what it returns is one call, one object in the store and one piece of bytes for as many completions as
came meanwhile.
"""

import asyncio
import logging
import os
import pickle
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from moerl.cluster.run_secret import RunSecret
from moerl.cluster.sockets import client_context
from moerl.hangs.python_stacks import answer_stack_requests
from moerl.hangs.watched import ProcessId
from moerl.rollout.fleet.collector import Answer, Intake
from moerl.rollout.fleet.continuation import rest
from moerl.rollout.server.client import abort_at, generate_at, new_session
from moerl.rollout.server.messages import parse_requests
from moerl.rollout.server.wire import GenerateRequest
from moerl.types.completion import Completion, DraftCounts, ServerLoad, VersionSpan
from moerl.types.errors import EngineError, MoerlError
from moerl.types.stored import InStore, Payload, StoredCompletion, keep_together

logger = logging.getLogger(__name__)

LINGER_SECONDS = 0.005
"""Time for others to come after the first answer."""


@dataclass(eq=False, slots=True, kw_only=True)
class _Asked:
    request: GenerateRequest
    so_far: StoredCompletion | None
    server: str
    url: str
    exchange: "asyncio.Task[None] | None" = None


class CollectorActor:
    """One of them; an actor of Ray."""

    def __init__(self, secret: RunSecret, authority: Path | None):
        self._secret, self._authority = secret, authority
        self._life = secrets.token_hex(8)
        self._intake: Intake | None = None
        self._session: aiohttp.ClientSession | None = None
        self._asked: dict[int, _Asked] = {}
        self._ready: dict[int, tuple[Completion, Payload] | MoerlError] = {}
        self._arrived = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_leaving = False

    async def begin(self, stored_intake: list[Any]) -> tuple[str, str, ProcessId]:
        """Answers when everything is there: a name of this process that none before or after it has, its node's, and its number."""
        await self._take(stored_intake)
        answer_stack_requests()
        return self._life, socket.gethostname(), ProcessId.of(os.getpid())

    async def submit(self, stored_intake: list[Any], submitted: bytes, so_far: Mapping[int, StoredCompletion]) -> None:
        """`stored_intake`: a reference, in every call, since an actor that Ray has made again has none, and of one among the arguments that
        it is made of Ray warns. `submitted`: url and name of the server, a number of its own for each request, and the message of all,
        pickled. Numbers that are here already are not asked again. `so_far`: what a push left of them."""
        url, server, numbers, data = pickle.loads(submitted)
        asked = {
            number: _Asked(request=request, so_far=so_far.get(number), server=server, url=url)
            for number, request in zip(numbers, parse_requests(data), strict=True)
            if number not in self._asked and number not in self._ready
        }
        # Nothing is waited for before they are noted: `drop` finds them, and every failure from here on is an answer to them.
        self._asked |= asked
        exchange = self._spawn(self._exchange(stored_intake, asked, data if len(asked) == len(numbers) and not so_far else None))
        for each in asked.values():
            each.exchange = exchange

    async def answers(self, life: str) -> tuple[str, list[Any], bytes]:
        """Name of this process, references, and answers for `unpacked`; at once and without answers if the driver knows another `life`."""
        if life != self._life:
            return self._life, [], packed([], {})
        while not self._ready and not self._is_leaving:
            self._arrived.clear()
            await self._arrived.wait()
        if self._asked:
            await asyncio.sleep(LINGER_SECONDS)
        ready, self._ready = self._ready, {}
        whole = {number: outcome for number, outcome in ready.items() if not isinstance(outcome, MoerlError)}
        errors = {number: outcome for number, outcome in ready.items() if isinstance(outcome, MoerlError)}
        stored = keep_together([payload for _, payload in whole.values()])
        references = list({each.reference: None for each in stored})
        places = [(references.index(each.reference), each.place) for each in stored]
        rows = [(number, *place, _row(*each)) for (number, each), place in zip(whole.items(), places, strict=True)]
        return self._life, references, packed(rows, errors)

    async def leave(self) -> None:
        """Before its process is killed: `answers` returns, since Ray tells the user of a call that is open then as of a failure."""
        self._is_leaving = True
        self._arrived.set()

    async def drop(self, numbers: Sequence[int]) -> None:
        """Nobody waits for them any more: their servers drop the requests."""
        dropped = [self._asked.pop(number) for number in numbers if number in self._asked]
        for number in numbers:
            self._ready.pop(number, None)
        asked = {each.exchange for each in self._asked.values()}
        for url, server in {(each.url, each.server) for each in dropped}:
            self._spawn(self._abort(url, server, [each.request.request_id for each in dropped if each.url == url]))
        for exchange in {each.exchange for each in dropped} - asked:
            if exchange is not None:  # nothing else is to come over this connection
                exchange.cancel()

    async def _exchange(self, stored_intake: list[Any], asked: Mapping[int, _Asked], data: bytes | None) -> None:
        """All to one server. `data`: their message, where nothing is there of any."""
        if not asked:
            return
        left = dict(asked)  # those that have not come
        try:
            await self._take(stored_intake)
            before = {number: await _whole(each.so_far) for number, each in asked.items()}
            requests = [_missing(each.request, before[number]) for number, each in asked.items()]
            numbers, (first, *_) = list(asked), asked.values()
            async for place, outcome in generate_at(self._connected(), first.url, first.server, requests, data):
                number = numbers[place]
                each = left.pop(number)
                if isinstance(outcome, EngineError):
                    self._end(number, outcome)
                else:
                    self._spawn(self._receive(number, each, before[number], outcome))
        except Exception as error:
            told = _told(error)
            for number in left:
                self._end(number, told)

    async def _receive(self, number: int, asked: _Asked, so_far: Completion | None, more: Completion) -> None:
        assert self._intake is not None
        try:
            self._end(number, await self._intake.received(more, asked.request, so_far, server=asked.server))
        except Exception as error:
            self._end(number, _told(error))

    async def _abort(self, url: str, server: str, request_ids: Sequence[str]) -> None:
        try:
            await abort_at(self._connected(), url, server, request_ids)
        except EngineError as error:  # it may be gone, which is why nobody waits any more
            logger.info("%s were not dropped: %s", ", ".join(request_ids[:4]), error)

    def _end(self, number: int, outcome: tuple[Completion, Payload] | MoerlError) -> None:
        if self._asked.pop(number, None) is not None:
            self._ready[number] = outcome
            self._arrived.set()

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = new_session(self._secret, client_context(self._authority))
        return self._session

    async def _take(self, stored_intake: list[Any]) -> None:
        if self._intake is None:
            self._intake = await stored_intake[0]

    def _spawn(self, work: Any) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def packed(rows: Sequence[tuple[Any, ...]], errors: Mapping[int, MoerlError]) -> bytes:
    """Answers as bytes: plain tuples, since pickling an object of a class costs ten times as much."""
    return pickle.dumps((rows, dict(errors)))


def unpacked(references: Sequence[Any], answers: bytes) -> dict[int, Answer | MoerlError]:
    """By number."""
    rows, found = pickle.loads(answers)
    for number, index, place, row in rows:
        found[number] = _answer(row, InStore(references[index], place))
    return found


def _row(completion: Completion, payload: Payload) -> tuple[Any, ...]:
    """Numbers of an engine's answer, all of whose tokens the policy produced and none of which has a weight of its own."""
    stored = StoredCompletion.of(completion, payload, InStore(None))
    spans = [(span.version, span.num_tokens, span.push_id) for span in stored.spans]
    numbers = (stored.num_tokens, stored.num_prompt, stored.routes_bytes, stored.num_bytes)
    drafts, load = (stored.drafts.checks, stored.drafts.accepted), (completion.load.cache_share, completion.load.num_preempted)
    return stored.request_id, numbers, spans, stored.finish_reason, drafts, load, payload.text


def _answer(row: tuple[Any, ...], payload: InStore[Payload]) -> Answer:
    request_id, (num_tokens, num_prompt, routes_bytes, num_bytes), spans, reason, drafts, load, text = row
    completion = StoredCompletion(
        request_id=request_id,
        num_tokens=num_tokens,
        num_prompt=num_prompt,
        spans=tuple(VersionSpan(version=version, num_tokens=count, push_id=push_id) for version, count, push_id in spans),
        finish_reason=reason,
        routes_bytes=routes_bytes,
        num_bytes=num_bytes,
        payload=payload,
        drafts=DraftCounts(*drafts),
    )
    return Answer(completion=completion, text=text, load=ServerLoad(cache_share=load[0], num_preempted=load[1]))


async def _whole(so_far: StoredCompletion | None) -> Completion | None:
    return None if so_far is None else so_far.whole(await asyncio.to_thread(so_far.payload.get))


def _missing(request: GenerateRequest, so_far: Completion | None) -> GenerateRequest:
    prompt_ids, sampling = rest(request.prompt_ids, request.sampling, so_far)
    return replace(request, prompt_ids=prompt_ids, sampling=sampling)


def _told(error: Exception) -> MoerlError:
    """The error itself, or of a bug one that names it."""
    if isinstance(error, MoerlError):
        return error
    logger.error("an answer could not be received", exc_info=error)
    return MoerlError(f"a process that receives completions failed: {type(error).__name__}: {error}")
