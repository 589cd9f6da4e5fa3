"""The generation thread: owns the model and everything that runs on it.

Other threads hand it commands, which it runs between iterations, so nothing changes under a forward pass and nothing needs a lock.

    commands --inbox--> [all commands] -> [one iteration, if there is work and nothing holds it] -> ...

Iterations are held while the server is stale, asleep or paused (a push thus holds running requests like pause(keep)). A paused server
takes new requests, also during a push, and lets them wait; otherwise a stale server refuses them.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Literal, TypeVar

from moerl.rollout.engines.hf.scheduler import Scheduler
from moerl.rollout.server.asleep import push_refusal, sleep_refusal
from moerl.rollout.server.contract import EngineHealth, MemoryPart, PauseMode
from moerl.rollout.server.engine_core import ServerRequest
from moerl.types.errors import EngineError, EngineUnavailable, WeightError
from moerl.types.push import Manifest, Needs, TransportOffer
from moerl.weights.receive import WeightSession

logger = logging.getLogger(__name__)

T = TypeVar("T")


class GenerationThread:
    """Public methods are safe from any thread. Those that return a Future report through it when the thread has done the work."""

    def __init__(self, scheduler: Scheduler, session: WeightSession, *, version: int | None, on_crash: Callable[[], None]):
        """`version` of the loaded weights; None: stale until a push. `on_crash` is called if the thread dies of an error."""
        self._scheduler = scheduler
        self._session = session
        self._version = version
        self._stale = "no weights were pushed yet" if version is None else ""
        self._pushing = False
        self._paused: PauseMode | None = None
        self._asleep: set[MemoryPart] = set()
        self._drained: list[Future[None]] = []
        self._on_crash = on_crash
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread after its current iteration; requests in flight get EngineUnavailable."""
        self._submit(self._close)
        self._thread.join()

    def generate(self, request: ServerRequest) -> None:
        """The outcome goes to request.done, also a refusal."""
        self._submit(lambda: self._accept(request))

    def abort(self, request_ids: tuple[str, ...] | None) -> Future[None]:
        return self._call(lambda: self._scheduler.abort(request_ids))

    def pause(self, mode: PauseMode) -> Future[None]:
        """Done when the mode is in force; for wait: when the last running request has finished."""
        done: Future[None] = Future()
        self._submit(lambda: self._pause(mode, done))
        return done

    def resume(self) -> Future[None]:
        return self._call(self._resume)

    def sleep(self, parts: tuple[MemoryPart, ...]) -> Future[int]:
        """Refuses as RolloutEngine.sleep says; nothing is moved, because this server runs on CPU."""
        return self._call(lambda: self._sleep(parts))

    def wake(self, parts: tuple[MemoryPart, ...]) -> Future[int]:
        return self._call(lambda: self._wake(parts))

    def health(self) -> EngineHealth:
        """As of the last iteration; does not wait for the thread."""
        status: Literal["stale", "asleep", "paused", "healthy"] = (
            "stale" if self._stale else "asleep" if self._asleep else "paused" if self._paused else "healthy"
        )
        return EngineHealth(
            status=status,
            version=self._version,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            reason=self._stale,
            asleep=tuple(sorted(self._asleep)),
        )

    def needs(self) -> Needs:
        return (self._session.needs,)

    def connect(self, offer: TransportOffer) -> None:
        """Blocks until it has a connection to the senders (nccl: until all have joined); call it from a thread that may wait. The model is
        not touched."""
        try:
            self._session.connect(offer)
        except WeightError as error:
            self._call(partial(self._become_stale, error)).result()
            raise

    def begin(self, manifest: Manifest) -> Future[None]:
        return self._call(lambda: self._begin(manifest))

    def install(self) -> Future[None]:
        return self._call(self._install)

    def finish(self, version: int) -> Future[None]:
        return self._call(lambda: self._finish(version))

    # -- on the generation thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._run_commands()
                if self._has_work():
                    assert self._version is not None
                    self._scheduler.step(self._version, admit=self._paused is None)
                self._report_drained()
        except BaseException:
            logger.exception("the generation thread failed")
            self._on_crash()

    def _run_commands(self) -> None:
        """All that wait; with nothing to iterate on, at least one."""
        if not self._has_work():
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()

    def _has_work(self) -> bool:
        if self._stale or self._asleep or self._paused in ("keep", "abort"):
            return False
        return self._scheduler.num_running > 0 or (self._paused is None and self._scheduler.num_waiting > 0)

    def _accept(self, request: ServerRequest) -> None:
        reason = "is asleep; wake it first" if self._asleep else ""
        if self._stale and not (self._pushing and self._paused):
            reason = f"is stale: {self._stale}; push weights first"
        try:
            if reason:
                raise EngineUnavailable(f"{request.request_id} refused, the server {reason}")
            self._scheduler.add(request)
        except EngineError as error:
            request.done(error)

    def _pause(self, mode: PauseMode, done: "Future[None]") -> None:
        self._supersede(f"pause({mode})")
        self._paused = mode
        if mode == "abort":
            self._scheduler.abort(None, waiting=False)
        if mode == "wait":
            self._drained.append(done)
        else:
            done.set_result(None)

    def _resume(self) -> None:
        self._supersede("resume")
        self._paused = None

    def _supersede(self, by: str) -> None:
        waiting, self._drained = self._drained, []
        for done in waiting:
            done.set_exception(EngineError(f"pause(wait) ended before its requests did, by {by}"))

    def _report_drained(self) -> None:
        if self._drained and self._scheduler.num_running == 0:
            drained, self._drained = self._drained, []
            for done in drained:
                done.set_result(None)

    def _sleep(self, parts: tuple[MemoryPart, ...]) -> int:
        if reason := sleep_refusal(parts, self._scheduler.num_running):
            raise EngineError(reason)
        self._asleep |= set(parts)
        return 0

    def _wake(self, parts: tuple[MemoryPart, ...]) -> int:
        self._asleep -= set(parts)
        return 0

    def _begin(self, manifest: Manifest) -> None:
        if reason := push_refusal(self._asleep):
            raise WeightError(reason)
        self._stale = f"the push of version {manifest.version} is in progress"
        self._pushing, self._version = True, None
        with self._stale_on_error():
            self._session.begin(manifest)

    def _install(self) -> None:
        with self._stale_on_error():
            self._session.install()

    def _finish(self, version: int) -> None:
        with self._stale_on_error():
            self._session.finish(version)
        self._version, self._stale, self._pushing = version, "", False

    @contextmanager
    def _stale_on_error(self) -> Iterator[None]:
        try:
            yield
        except WeightError as error:
            self._become_stale(error)
            raise

    def _become_stale(self, error: WeightError) -> None:
        self._stale, self._version, self._pushing = str(error), None, False
        self._scheduler.fail(f"the server is stale: {error}")

    def _close(self) -> None:
        self._closing = True
        self._supersede("the end of the server")
        self._scheduler.fail("the server is shutting down")
        self._session.close()

    # -- on any thread -----------------------------------------------------------------------------------------

    def _submit(self, command: Callable[[], None]) -> None:
        self._inbox.put(command)

    def _call(self, function: Callable[[], T]) -> "Future[T]":
        """Run on the thread; its MoerlErrors go to the caller, any other error is a bug and ends the server."""
        future: Future[T] = Future()

        def command() -> None:
            try:
                future.set_result(function())
            except (EngineError, WeightError) as error:
                future.set_exception(error)

        self._submit(command)
        return future
