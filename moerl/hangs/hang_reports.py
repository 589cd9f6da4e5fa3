"""A phase that missed its deadline: who did not arrive, with stacks, progress and GPUs of all, as a file in the run's directory.

    run_dir/hangs/20260131-120000-update/report.txt     begins with the conclusion

Any part that waits for others with a deadline asks for the report at the miss, before it cancels or kills anything, and raises the
HangError that comes back.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ray.exceptions import RayError

from moerl.cluster.ray_nodes import on_node
from moerl.hangs.examine import Examined, NodeReport, examine
from moerl.hangs.suspects import STOPPED, Seen, doing, find_suspects
from moerl.hangs.watched import WatchedProcess
from moerl.types.errors import HangError, Origin

logger = logging.getLogger(__name__)

_EXAMINE_SECONDS = 90.0
"""Seconds for one node to look at its processes; those that hang do not slow it down, many of them do."""
_SAME_SECONDS = 10.0
"""Two parts that wait for the same processes miss their deadlines together; that is one hang."""
_LOG_LINES = 20
_COMMAND_CHARACTERS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finding:
    watched: WatchedProcess
    seen: Seen
    processes: tuple[Examined, ...] = ()
    stopped: Examined | None = None
    """Process below it that is stopped, as one of an engine's own may be."""
    silent: bool


class HangReports:
    def __init__(self, run_dir: Path):
        self._directory = run_dir / "hangs"
        self._in_pushes: list[Callable[[], Sequence[WatchedProcess]]] = []
        self._newest: dict[str, tuple[float, frozenset[str], asyncio.Task[HangError]]] = {}

    def include_in_pushes(self, watched: Callable[[], Sequence[WatchedProcess]]) -> None:
        """Both sides of a push may wait for one of the other: reports about pushes look at these too."""
        self._in_pushes.append(watched)

    async def report(self, phase: str, deadline: str, *, watched: Sequence[WatchedProcess], silent: Sequence[str]) -> HangError:
        """Examines all `watched`, of which the `silent` ones, by their names, did not arrive. `deadline`: its value and its setting."""
        begun, names, task = self._newest.get(phase, (0.0, frozenset(), None))
        if task is None or not names >= set(silent) or time.monotonic() - begun > _SAME_SECONDS:
            others = [each for source in self._in_pushes for each in source()] if phase == "push" else []
            all_watched = list({each.name: each for each in (*others, *watched)}.values())
            task = asyncio.create_task(self._report(phase, deadline, all_watched, silent))
            self._newest[phase] = (time.monotonic(), frozenset(silent), task)
        return await asyncio.shield(task)

    async def _report(self, phase: str, deadline: str, watched: Sequence[WatchedProcess], silent: Sequence[str]) -> HangError:
        nodes = await _examine_nodes(watched)
        pids = {each.process.pid for each in watched if each.process is not None}
        findings = {each.name: _finding(each, nodes.get(each.name), pids, silent=each.name in silent) for each in watched}
        reasons = find_suspects({name: finding.seen for name, finding in findings.items()}, silent)
        conclusion = list(_conclusion(phase, deadline, findings, reasons, silent))
        text = "\n".join([*conclusion, "", *_whole(findings, nodes)])
        try:
            path = str(await asyncio.to_thread(self._write, phase, text))
        except OSError as unwritten:  # the conclusion must reach the run also where the disk is full
            logger.error("the report cannot be written (%s):\n%s", unwritten, text)
            path = f"in the log, as the file cannot be written: {unwritten}"
        late = findings[next(iter(reasons))].watched
        logger.info("a report about %s that did not arrive: %s", ", ".join(reasons), path)
        error = HangError("\n".join([*conclusion, f"stacks and progress of all: {path}"]))
        error.names = tuple(reasons)
        return error.began_in(Origin(who=", ".join(reasons), node=late.node, doing=phase, log=path))

    def _write(self, phase: str, text: str) -> Path:
        name = f"{datetime.now():%Y%m%d-%H%M%S}-{phase}"
        for number in range(1, 1000):
            directory = self._directory / (name if number == 1 else f"{name}-{number}")
            if not directory.exists():
                break
        directory.mkdir(parents=True)
        path = directory / "report.txt"
        path.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
        return path


async def _examine_nodes(watched: Sequence[WatchedProcess]) -> dict[str, tuple[NodeReport, int] | str]:
    """Finding for each watched process that has started: its node's report and its place in it, or why there is none."""
    by_node: dict[str | None, list[WatchedProcess]] = {}
    for each in watched:
        if each.process is not None:
            by_node.setdefault(each.node_id, []).append(each)

    async def examine_node(node_id: str | None, there: list[WatchedProcess]) -> NodeReport | str:
        try:
            return await on_node(node_id, examine, [each.process for each in there], seconds=_EXAMINE_SECONDS)
        except (RayError, OSError) as error:  # TimeoutError is an OSError
            return f"{type(error).__name__}: {error}".strip(": ")

    reports = await asyncio.gather(*(examine_node(node_id, there) for node_id, there in by_node.items()))
    return {
        each.name: (report, place) if isinstance(report, NodeReport) else report
        for report, there in zip(reports, by_node.values(), strict=True)
        for place, each in enumerate(there)
    }


def _finding(watched: WatchedProcess, node: tuple[NodeReport, int] | str | None, pids: Collection[int], *, silent: bool) -> _Finding:
    """`pids`: of all that are watched. What is below the driver is not the driver's part of it."""
    if not isinstance(node, tuple):
        state = "not started" if watched.process is None else "unreachable"
        return _Finding(watched=watched, seen=Seen(state=state, rank=watched.rank), silent=silent)
    report, place = node
    processes = report.processes[place]
    first, below = (processes[0], processes[1:]) if processes else (None, ())  # it may end while it is looked at
    state, progress = ("gone", {}) if first is None else (first.state, first.progress)
    stopped = None
    if state not in STOPPED and not any(each.pid in pids for each in below):
        stopped = next((each for each in below if each.state in STOPPED), None)
    seen = Seen(state=state if stopped is None else stopped.state, clock=report.clock, progress=progress, rank=watched.rank)
    return _Finding(watched=watched, seen=seen, processes=processes, stopped=stopped, silent=silent)


def _conclusion(
    phase: str, deadline: str, findings: Mapping[str, _Finding], reasons: Mapping[str, str], silent: Sequence[str]
) -> Iterator[str]:
    yield f"{phase}: {', '.join(reasons)} did not arrive within {deadline}"
    for name, reason in reasons.items():
        watched, what = findings[name].watched, doing(findings[name].seen)
        pid = f", process {watched.process.pid}" if watched.process is not None else ""
        if (stopped := findings[name].stopped) is not None:
            pid = f", process {stopped.pid} below it ({stopped.command[:_COMMAND_CHARACTERS].strip()})"
        yield f"* {name} on node {watched.node}{pid}: {reason}" + (f"\n    {what}" if what else "")
    if others := [name for name in silent if name not in reasons]:
        yield f"no answer either from {', '.join(others)}"


def _whole(findings: Mapping[str, _Finding], nodes: Mapping[str, tuple[NodeReport, int] | str]) -> Iterator[str]:
    for finding in findings.values():
        yield from _section(finding, nodes.get(finding.watched.name))
    reports = {node[0].node: node[0] for node in nodes.values() if isinstance(node, tuple)}
    for name, report in reports.items():
        yield f"== GPUs of node {name}\n{report.gpus}\n"


def _section(finding: _Finding, node: tuple[NodeReport, int] | str | None) -> Iterator[str]:
    watched = finding.watched
    yield f"== {watched.name} on node {watched.node}: {'did not answer' if finding.silent else 'answered, or was not asked'}"
    if isinstance(node, str):
        yield f"its node: {node}"
    if what := doing(finding.seen):
        yield f"progress: {what}"
    for process in finding.processes:
        yield f"\nprocess {process.pid}, {process.state}, {process.rss_bytes / 1e6:.0f} MB: {process.command}"
        yield f"stacks: {process.stacks.source}\n{process.stacks.text}".rstrip()
    if watched.log is not None:
        yield f"\nlast lines of {watched.log}:\n{_last_lines(watched.log)}"
    yield ""


def _last_lines(log: Path) -> str:
    try:
        return "\n".join(f"    {line}" for line in log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
    except OSError as error:
        return f"    ({error})"
