"""One node of a Slurm job, from its first process to its last.

    every node: look at what it has -> meet at the first node -> Ray's daemons -> ... -> end every descendant, remove its directory
    first node: enough GPUs? everybody here? nodes alike? -> Ray's head -> everybody registered? -> moerl train -> tell the others

Nothing waits for a fixed time, and every wait has a deadline that names who is missing.
"""

import asyncio
import contextlib
import logging
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from moerl.cluster.descendants import END_SECONDS, end_with_parent, no_descendant_outlives
from moerl.cluster.process_log import process_seconds
from moerl.config.derive.gpu_map import num_gpus
from moerl.config.schema.job_config import has_preflight
from moerl.config.schema.run_config import RunConfig
from moerl.slurm.allocation import AllocatedNode, JobPlace, check_allocation, foreign_rays, node_facts, place_of, too_few_nodes
from moerl.slurm.meeting import Guest, common_address, hold_meeting, join_meeting
from moerl.slurm.ray_daemons import RayEnded, RayNode, host_of, wait_until_registered
from moerl.train.checkpoint.checkpoint_dirs import newest
from moerl.types.errors import MoerlError, RunStopped
from moerl.types.exit_codes import ExitCode

logger = logging.getLogger(__name__)


# Files that the first node leaves for the job's script. PREFIX.lost: the nodes that the job has lost in all its tries, one a line; Slurm is
# asked for others. PREFIX.again: the job is to be queued again. srun's exit code does not tell: it is 137 when any task was killed.


def lost_file(marks: Path) -> Path:
    return marks.with_name(f"{marks.name}.lost")


def mark_again(marks: Path) -> None:
    """The script removes it before a try. Without it only the exit code is left, which the killing of a task hides."""
    file = marks.with_name(f"{marks.name}.again")
    try:
        file.touch()
    except OSError as error:
        logger.warning("%s cannot be written (%s): the job may not be queued again", file, error.strerror)


def remember(file: Path, name: str, *, at_most: int) -> str:
    """Adds the node, unless there are as many already; says what came of it, for people. The script may still find too few others."""
    known = file.read_text().split() if file.exists() else []
    if name in known:
        return f"{name} was lost before"
    if len(known) >= at_most:
        already = f", beside {', '.join(known)}" if known else ""
        return f"{name} is not excluded{already}: slurm.max_excluded = {at_most}"
    try:
        with file.open("a") as out:
            out.write(f"{name}\n")
    except OSError as error:
        return f"{name} is not excluded: {file} cannot be written ({error.strerror})"
    return f"{name} is to be excluded ({len(known) + 1} of slurm.max_excluded = {at_most})"


T = TypeVar("T")
Watch = list["asyncio.Future[None]"]
"""Tasks that never return: they raise when the job has lost something."""


_EXIT_CODES = dict.fromkeys((ExitCode.CONTINUE, ExitCode.KILLED, -signal.SIGKILL), ExitCode.QUEUE_AGAIN)
"""Exit codes of the driver -> of this task, where they differ."""
_ENDS = {signal.SIGTERM: ExitCode.TERMINATED, signal.SIGUSR1: ExitCode.QUEUE_AGAIN}
"""Signals that ask a job to end -> its exit code."""
_LOSES = (ExitCode.FAILED, ExitCode.UNUSABLE, ExitCode.KILLED)
"""Exit codes with which a driver may end because the job lost something: UNUSABLE where it finds fewer nodes than are configured."""
_SETTLE_SECONDS = 5.0
_DRIVER_END_SECONDS = 30.0
"""Seconds for the driver to end its servers and ranks after SIGTERM."""
LAST_SECONDS = _SETTLE_SECONDS + _DRIVER_END_SECONDS + END_SECONDS + 5.0
"""At most from the end of one node's process to the end of the others, with 5 s for Ray's logs: a shorter --wait of srun cuts a node short,
which then neither queues the job again nor removes its directory."""
_OPEN_FILES = 65536
_MAX_DIRECTORY = 40
"""Characters: Ray's sockets lie up to 67 deeper, and the name of a socket has 107 at most."""


def run_node(config: RunConfig, arguments: Sequence[str], marks: Path | None = None, evaluation: Sequence[str] | None = None) -> int:
    """The exit code of this node's task. `arguments`: of `moerl train`. `marks`: of moerl/slurm/job_node.py. `evaluation`: further
    ones of `moerl eval`, which the first node then starts instead.

    MoerlError says what is wrong with which node; RunStopped that a signal came before there was anything to save.
    """
    place = place_of(os.environ)
    if refusal := too_few_nodes(place, config.slurm, num_gpus(config)):
        if place.index > 0:  # it would wait for the first one, which says why
            return ExitCode.FAILED
        raise MoerlError(refusal)
    log = config.run_dir / "slurm" / place.job / f"{place.name}.log"
    complaint = _unwritable(log)
    if complaint is not None and place.index == 0:
        raise MoerlError(f"{place.name}: {complaint}")
    _log_to(log if complaint is None else None, place)
    allow_open_files()
    logger.info("imports and settings took %.1f s", process_seconds())
    facts = node_facts(place, config.slurm, complaints=() if complaint is None else (complaint,))
    with _own_directory(place, log.with_suffix("")) as directory:
        node = _Node(config, place, facts, log=log, directory=directory, marks=marks, evaluation=evaluation)
        with no_descendant_outlives():
            return asyncio.run(node.run(arguments))


def allow_open_files() -> None:
    """Limit for this process and what it starts: Ray has a connection per process, and Slurm hands on the soft limit of the submitting
    shell."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class _NodeLost(MoerlError):
    """Another node's process is gone; the job itself may be sound."""

    def __init__(self, name: str, log: Path):
        super().__init__(f"{name} is gone; its log is {log}")
        self.name = name


class _Node:
    def __init__(
        self, config: RunConfig, place: JobPlace, facts: AllocatedNode, *, log: Path, directory: Path, marks: Path | None,
        evaluation: Sequence[str] | None,
    ):  # fmt: skip
        self._marks, self._evaluation = marks, evaluation
        self._config, self._place, self._facts, self._log, self._directory = config, place, facts, log, directory
        self._meeting_file = log.parent / "meeting.json"
        self._seconds = config.slurm.start_seconds
        self._begun_with = self._saved()
        self._signal: signal.Signals | None = None
        self._driver: asyncio.subprocess.Process | None = None
        self._is_led = False
        for ray in foreign_rays():
            logger.warning("another Ray runs here (%s); this job does not touch it", ray)

    async def run(self, arguments: Sequence[str]) -> int:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        for number in _ENDS:
            loop.add_signal_handler(number, self._asked, number, task)
        try:
            code = await (self._lead(arguments) if self._place.index == 0 else self._follow())
        except asyncio.CancelledError:
            if self._signal is None:
                raise
            if _ENDS[self._signal] == ExitCode.QUEUE_AGAIN and self._is_stuck():
                raise _stuck() from None
            raise RunStopped(self._signal.name, _ENDS[self._signal]) from None
        except (_NodeLost, RayEnded) as lost:
            if self._place.index > 0:  # the first node hears of it, and decides
                raise
            if self._is_stuck():
                raise
            logger.error("the job is queued again and goes on from the newest checkpoint: %s", lost)
            if self._marks is not None:
                if isinstance(lost, _NodeLost):
                    logger.warning("%s", remember(lost_file(self._marks), lost.name, at_most=self._config.slurm.max_excluded))
                mark_again(self._marks)
            return ExitCode.QUEUE_AGAIN
        if code == ExitCode.QUEUE_AGAIN and self._is_stuck():
            raise _stuck()
        return code

    def _is_stuck(self) -> bool:
        """A run that ends each node it meets, say, would be queued as often as it is allowed to."""
        return not self._place.is_first_try and self._saved() == self._begun_with

    def _saved(self) -> object:
        """Point that a job goes on from, to compare: the newest checkpoint, or how many bytes of samples there are of an evaluation."""
        if self._evaluation is None:
            return newest(self._config.run_dir / "checkpoints")
        return sum(file.stat().st_size for file in (self._config.run_dir / "eval").rglob("*.jsonl"))

    def _asked(self, number: signal.Signals, task: "asyncio.Task[int]") -> None:
        """Slurm signals every process of a step, or only this one. The driver saves; Ray and the other nodes wait for it."""
        self._signal = number
        if self._driver is not None and self._driver.returncode is None:
            self._driver.send_signal(number)
        elif not self._is_led:
            task.cancel()

    async def _lead(self, arguments: Sequence[str]) -> int:
        """The driver's exit code; QUEUE_AGAIN for a run that is to be continued."""
        async with hold_meeting(self._meeting_file, self._config.network.interface) as meeting, _watching() as watch:
            guests = await meeting.gather(self._place.names[1:], self._seconds)
            watch += [asyncio.create_task(self._lost(guest)) for guest in guests]
            try:
                # A job of one node needs no other address than that of its loopback.
                ray = self._ray(common_address(guests) if guests else "127.0.0.1", meeting.secret.key)
                cluster = await self._start_cluster(ray, guests, watch)
                if has_preflight(self._config.slurm):
                    await self._preflight(arguments, cluster, watch)
                return await self._train(arguments, cluster, watch)
            finally:
                for guest in guests:
                    await guest.link.tell(ended=True)

    async def _follow(self) -> int:
        """Ends with the first node."""
        link, token = await join_meeting(self._meeting_file, self._facts, self._seconds)
        self._is_led = True
        async with _watching() as watch:
            message = await link.hear()
            if message is not None and "ray" in message:
                await self._start_ray(self._ray(link.own_address, token), message["ray"], watch)
                message = await _unless(link.hear(), watch)
        if message is None:
            raise MoerlError(f"{self._place.name}: the first node is gone; its log is {self._log.parent}/{self._place.names[0]}.log")
        return 0

    async def _start_cluster(self, ray: RayNode, guests: Sequence[Guest], watch: Watch) -> str:
        nodes = [self._facts, *(guest.facts for guest in guests)]
        if refusals := check_allocation(nodes, self._config.slurm, num_gpus(self._config)):
            raise MoerlError("these nodes cannot run the job\n" + "\n".join(f"* {refusal}" for refusal in refusals))
        os.environ.update(ray.environment())
        cluster = await self._start_ray(ray, None, watch)
        for guest in guests:
            await guest.link.tell(ray=cluster)
        # As Ray has it: a loopback, which it is given in a job of one node, it replaces by another address of the node, perhaps of IPv6.
        expected = [(host_of(cluster), self._facts), *((guest.link.peer_address, guest.facts) for guest in guests)]
        await _unless(wait_until_registered(cluster, expected, self._seconds), watch)
        logger.info("Ray runs on %d nodes at %s", len(nodes), cluster)
        return cluster

    async def _start_ray(self, ray: RayNode, cluster: str | None, watch: Watch) -> str:
        try:
            async with asyncio.timeout(self._seconds):
                address, end = await _unless(ray.start(cluster), watch)
        except TimeoutError as error:
            raise MoerlError(f"{self._place.name}: Ray did not start within slurm.start_seconds; see {self._log}") from error
        watch.append(asyncio.ensure_future(end))
        return address

    async def _preflight(self, arguments: Sequence[str], cluster: str, watch: Watch) -> None:
        """MoerlError if a node cannot carry the run; the doctor has said on standard output which, and why."""
        found = self._log.parent / "doctor.json"
        counts = [f"--nodes={len(self._place.names)}", f"--gpus-per-node={self._config.slurm.gpus_per_node}"]
        doctor = await _start_moerl(cluster, "doctor", *counts, f"--json={found}", "--fix", *arguments)
        try:
            code = await _unless(doctor.wait(), watch)
        finally:
            if doctor.returncode is None:
                doctor.kill()
                await doctor.wait()
        if code:
            raise MoerlError(
                f"moerl doctor ended with {code}: what failed is above and in {found}; slurm.preflight=false trains without it"
            )

    async def _train(self, arguments: Sequence[str], cluster: str, watch: Watch) -> int:
        self._driver = driver = await _start_moerl(cluster, *self._verb(), *arguments)
        try:
            code = await _unless(driver.wait(), watch)
        finally:
            if driver.returncode is None:
                driver.terminate()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_DRIVER_END_SECONDS):
                        await driver.wait()
        if self._signal is not None and code == -self._signal:  # it came before the driver heeded it
            return _ENDS[self._signal]
        if code < 0 or code in _LOSES:
            await _raise_if_lost(watch)
        return _EXIT_CODES.get(code, code if code >= 0 else 128 - code)

    def _verb(self) -> list[str]:
        """Command of the driver, with its options."""
        if self._evaluation is not None:
            return ["eval", *self._evaluation]
        # Slurm >= 23.02 says when it takes the nodes away.
        end = os.environ.get("SLURM_JOB_END_TIME")
        return ["train", *([] if end is None else [f"--ends-at={end}"])]

    async def _lost(self, guest: Guest) -> None:
        while await guest.link.hear() is not None:
            pass
        raise _NodeLost(guest.facts.name, self._log.parent / f"{guest.facts.name}.log")

    def _ray(self, address: str, token: str) -> RayNode:
        return RayNode(
            facts=self._facts, address=address, directory=self._directory, token=token, log=self._log, seconds=self._seconds
        )  # fmt: skip


def _stuck() -> MoerlError:
    return MoerlError(
        "the job is not queued again: it was once before, and nothing was saved since. A step that hangs or is killed each "
        "time, or start-up and one step longer than slurm.time, would come back for ever"
    )


async def _start_moerl(cluster: str, *words: str) -> asyncio.subprocess.Process:
    environment = {**os.environ, "RAY_ADDRESS": cluster}
    return await asyncio.create_subprocess_exec(sys.executable, "-m", "moerl", *words, env=environment, preexec_fn=end_with_parent)


async def _unless(work: Awaitable[T], watch: Watch) -> T:
    """The result of `work`, or what a watch raises before."""
    task: asyncio.Future[T] = asyncio.ensure_future(work)
    waiting: list[asyncio.Future[Any]] = [task, *watch]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            for watcher in watch:
                if watcher.done():
                    watcher.result()
        return await task
    finally:
        task.cancel()


async def _raise_if_lost(watch: Watch) -> None:
    """The driver may see a lost node by what fails there, and end before this process knows why."""
    done, _ = await asyncio.wait(watch, timeout=_SETTLE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    for watcher in done:
        watcher.result()


@asynccontextmanager
async def _watching() -> AsyncIterator[Watch]:
    """A list of tasks, which end with the block."""
    watch: Watch = []
    try:
        yield watch
    finally:
        for task in watch:
            task.cancel()
        await asyncio.gather(*watch, return_exceptions=True)


def _unwritable(log: Path) -> str | None:
    """Why this node cannot keep its log; None if it can."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
    except OSError as error:
        return f"{log.parent} cannot be written ({error.strerror}); output_dir= must be on storage that all nodes can write"
    return None


def _log_to(log: Path | None, place: JobPlace) -> None:
    """The node's own log, in the run's directory; on the job's log only what the first node does, and warnings of the others."""
    console = logging.StreamHandler()
    console.setLevel(logging.INFO if place.index == 0 else logging.WARNING)
    handlers: list[logging.Handler] = [console] if log is None else [console, logging.FileHandler(log)]
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {place.name}: %(message)s", handlers=handlers, force=True)


@contextmanager
def _own_directory(place: JobPlace, kept_logs: Path) -> Iterator[Path]:
    """On the node's own disk, gone afterwards but for what Ray logged. What killed tries of this job have left goes first."""
    name = f"moerl-{place.job}-{place.index}-"
    root = Path(tempfile.gettempdir())
    root = root if len(str(root)) + len(name) + 9 <= _MAX_DIRECTORY else Path("/tmp")
    for left in root.glob(f"moerl-{place.job.rpartition('-')[0]}-*"):
        if not left.name.startswith(f"moerl-{place.job}-"):
            shutil.rmtree(left, ignore_errors=True)
    directory = Path(tempfile.mkdtemp(prefix=name, dir=root))
    try:
        yield directory
    finally:
        try:
            for file in filter(Path.is_file, (directory / "session_latest" / "logs").glob("*")):
                kept_logs.mkdir(exist_ok=True)
                shutil.copyfile(file, kept_logs / file.name)
        except OSError as error:
            logger.warning("Ray's logs could not be kept: %s", error)
        shutil.rmtree(directory, ignore_errors=True)
