"""A run that is asked to end soon saves what it has trained first: after a signal, and before the time of its allocation is over.
`moerl end` asks from outside; pods call it before they are taken away.

    stop = Stop(config.checkpoint.reserve_seconds, ends_at=...)
    groups = await stop.unless(buffer.take(n))      RunStopped instead, at once, when the run is asked to end

Rollouts are given up, since a continued run draws the same prompts again; an update that has begun is brought to its end. Ctrl-C reaches a
run in whatever loop its caller has (run_until_done).
"""

import asyncio
import logging
import math
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import psutil

from moerl.types.errors import CommandError, ConfigError, MoerlError, RunStopped, problem
from moerl.types.exit_codes import ExitCode

logger = logging.getLogger(__name__)
T = TypeVar("T")
_CONNECT_SECONDS = 5.0


class Stop:
    """Made inside the event loop, by the task that it may cancel."""

    def __init__(self, reserve_seconds: float, *, ends_at: float | None = None, now: Callable[[], float] = time.monotonic):
        """`ends_at`: when the machine is taken away, in seconds since 1970; None: unknown. `reserve_seconds`: for the last checkpoint."""
        self._reserve_seconds, self._now = reserve_seconds, now
        # The wall clock is read once: whoever sets it later moves neither the end nor the length of a step.
        self._ends_at = None if ends_at is None else now() + (ends_at - time.time())
        self._task = asyncio.current_task()
        self._asked = asyncio.Event()
        self.stopped: RunStopped | None = None
        """Why and how the run ends, once it was asked to."""
        self.failed: MoerlError | None = None
        self.unfinished: MoerlError | None = None
        """Error of a push under way when `unless` gave its work up: the trainer cannot have its GPUs, as a checkpoint needs."""
        self._is_heeded = False
        self._step_began: float | None = None
        self._longest_step = 0.0

    def fail(self, error: MoerlError) -> None:
        """End at once, with nothing saved: what the run needs is gone. The first such error is what `asked_to_stop` raises."""
        if self.failed is None:
            self.failed = error
            assert self._task is not None
            self._task.cancel()

    def ask(self, reason: str, exit_code: int = ExitCode.CONTINUE) -> None:
        """End soon; before the first step, when there is nothing to save, at once. Asking again changes nothing: schedulers send several
        signals, and the second must not break off the save that the first one began."""
        if self.stopped is not None:
            return
        self.stopped = RunStopped(reason, exit_code)
        self._asked.set()
        if self._is_heeded:
            logger.warning("%s: the run saves its last step and ends", reason)
        else:
            assert self._task is not None
            self._task.cancel()

    def ask_in_time(self) -> asyncio.TimerHandle | None:
        """Timer of asking when what is left is for the last checkpoint; None if there is no such time."""
        if self._ends_at is None:
            return None
        seconds, reason = self._ends_at - self._reserve_seconds - self._now(), "s left, which are for the last checkpoint"
        return asyncio.get_running_loop().call_later(seconds, self.ask, f"{self._reserve_seconds:g} {reason}")

    async def unless(self, work: Awaitable[T]) -> T:
        """`work`, which begins a step; RunStopped, with `work` cancelled, once the run is asked to end or has no time for another step."""
        self._is_heeded = True
        self._begin_step()
        working, asked = asyncio.ensure_future(work), asyncio.create_task(self._asked.wait())
        try:
            await asyncio.wait({working, asked}, return_when=asyncio.FIRST_COMPLETED)
            if self.stopped is not None:
                raise self.stopped
            return working.result()
        finally:
            was_done = working.done()
            for task in (working, asked):
                task.cancel()
            outcome, _ = await asyncio.gather(working, asked, return_exceptions=True)
            if self.stopped is not None and not was_done and isinstance(outcome, MoerlError):
                logger.error("a push failed as the run was asked to end: %s", outcome)
                self.unfinished = outcome

    def _begin_step(self) -> None:
        now = self._now()
        if self._step_began is not None:
            self._longest_step = max(self._longest_step, now - self._step_began)
        self._step_began = now
        if self.stopped is None and self._ends_at is not None and now + self._longest_step > self._ends_at - self._reserve_seconds:
            left, step = self._ends_at - now, self._longest_step
            self.ask(f"{left:.0f} s left, {self._reserve_seconds:g} s of them for the last checkpoint; a step took up to {step:.0f} s")


@contextmanager
def asked_to_stop(reserve_seconds: float, *, ends_at: float | None) -> Iterator[Stop]:
    """A Stop for the block; a cancellation that comes from it leaves as RunStopped, or as the error that made it fail, with whatever
    followed from that."""
    stop = Stop(reserve_seconds, ends_at=ends_at)
    timer = stop.ask_in_time()  # from the beginning: a warm start may take longer than the machine is there
    try:
        yield stop
    except (asyncio.CancelledError, MoerlError) as error:
        if stop.failed is not None:
            raise stop.failed from None
        if stop.stopped is not None and isinstance(error, MoerlError):
            error.asked_to_end = stop.stopped.exit_code
        if stop.stopped is None or isinstance(error, MoerlError):
            raise
        raise stop.stopped from None
    finally:
        if timer is not None:
            timer.cancel()


def require_ahead(ends_at: float | None) -> None:
    """Raises ConfigError for an end, in seconds since 1970, that is over, or no time at all: a run that ends at once says that the same
    command continues it, and whoever believes it starts it for ever."""
    now = time.time()
    if ends_at is not None and not now < ends_at < math.inf:
        reason = f"it counts seconds since 1970, of which there are {now:.0f} now, and a run that has no time left saves nothing"
        raise ConfigError([problem("ends_at", ends_at, "must lie ahead", reason, "$(($(date +%s) + 3600)) for an hour from now")])


def end_run(run_dir: Path, seconds: float) -> str:
    """Outcome, for people. SIGTERM to the run's driver on this machine, which has `seconds` to end."""
    if not run_dir.is_dir():
        raise CommandError([problem("RUN", str(run_dir), "must be a run's directory", "there is none", "its path, output_dir/name")])
    return _end_driver(run_dir, seconds)


def _end_driver(run_dir: Path, seconds: float) -> str:
    driver = driver_of(run_dir)
    if driver is None:
        return f"nothing trains {run_dir} on {socket.gethostname()}"
    descriptor = os.pidfd_open(driver.pid)
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        # Readable once it has ended, whether or not its parent has asked how.
        ended, _, _ = select.select([descriptor], [], [], seconds)
    finally:
        os.close(descriptor)
    return f"pid {driver.pid} ended" if ended else f"pid {driver.pid} did not end within {seconds:g} s"


def end_run_at_head(run_dir: Path, seconds: float, address: str) -> str:
    """The same on the head node of the Ray cluster at `address` (HOST:PORT). Nothing is waited for if there is no Ray any more."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise CommandError(
            [problem("--address", address, "must be HOST:PORT", "Ray's head listens there", "what RAY_ADDRESS is on its nodes")]
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        return f"no Ray at {address}: {error}"
    import ray

    ray.init(address, log_to_driver=False, logging_level="ERROR")
    try:
        # Ray's own name for the head's share of itself: 0.001 of it finds room beside whatever runs there.
        there = ray.remote(num_cpus=0, max_retries=0, resources={"node:__internal_head__": 0.001})(_end_driver)
        return str(ray.get(there.remote(run_dir, seconds)))
    finally:
        ray.shutdown()


def driver_of(run_dir: Path) -> psutil.Process | None:
    """The process on this machine that holds the run's lock."""
    lock = str((run_dir / ".lock").resolve())
    for process in psutil.process_iter():
        try:
            if any(file.path == lock for file in process.open_files()):
                return process
        except psutil.Error:  # it has just ended, or is somebody else's
            continue
    return None


def run_until_done(main: Coroutine[Any, Any, T]) -> T:
    """As asyncio.run; in a thread where this one runs a loop already, as a notebook's does. Ctrl-C ends it there too. SIGTERM while Ray
    starts, whose handler leaves by SystemExit, is RunStopped."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        try:
            return _run_here(main)
        except SystemExit as ended:
            if ended.code != signal.SIGTERM:
                raise
            raise RunStopped(signal.SIGTERM.name, ExitCode.TERMINATED) from None
    begun: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []
    interrupts: list[int] = []

    def interrupt(number: int, _frame: FrameType | None = None) -> None:
        interrupts.append(number)
        for loop, task in begun if len(interrupts) == 1 else ():  # another would break off what the first one ends
            with suppress(RuntimeError):  # the loop is closed: it has ended meanwhile
                loop.call_soon_threadsafe(task.cancel)  # what it started ends before the thread does

    async def announced() -> T:
        task = asyncio.current_task()
        assert task is not None
        begun.append((asyncio.get_running_loop(), task))
        if interrupts:
            task.cancel()
        return await main

    with ThreadPoolExecutor(1) as thread, _handler(signal.SIGINT, interrupt):
        running = thread.submit(asyncio.run, announced())
        try:
            while not running.done():
                wait([running], timeout=1.0)  # no longer: a Ctrl-C that comes as this thread lies down is heard when it wakes
        except KeyboardInterrupt:
            interrupt(signal.SIGINT)
            raise
    if interrupts:
        raise KeyboardInterrupt
    return running.result()


def _run_here(main: Coroutine[Any, Any, T]) -> T:
    """As asyncio.run, but that a second Ctrl-C does not break off what the first one ends: half of that leaves Ray to be waited for, or
    starts another. It raises KeyboardInterrupt where the first has not reached the task yet, as while Ray starts."""
    begun: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []
    asked, heard = threading.Event(), threading.Event()

    def interrupt(_number: int, _frame: FrameType | None = None) -> None:
        if heard.is_set():
            return
        if asked.is_set() or not begun:
            raise KeyboardInterrupt
        asked.set()
        [(loop, task)] = begun
        loop.call_soon_threadsafe(heard.set)
        task.cancel()

    async def announced() -> T:
        task = asyncio.current_task()
        assert task is not None
        begun.append((asyncio.get_running_loop(), task))
        return await main

    with _handler(signal.SIGINT, interrupt), _kept_handlers(signal.SIGTERM, signal.SIGUSR1):
        try:
            return asyncio.run(announced())
        except asyncio.CancelledError:
            if asked.is_set():
                raise KeyboardInterrupt from None
            raise


@contextmanager
def _kept_handlers(*numbers: int) -> Iterator[None]:
    """The caller's stand again after the block: Ray sets one of its own, and a loop that had one leaves none."""
    kept = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in kept.items():
                if handler is not None:  # of C code: it cannot be set again
                    signal.signal(number, handler)


@contextmanager
def _handler(number: int, handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """In place of Python's own, whose KeyboardInterrupt is lost if it meets a destructor. A handler of somebody else stays."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(number) is not signal.default_int_handler:
        yield
        return
    signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, signal.default_int_handler)
