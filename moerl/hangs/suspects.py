"""Who of several processes did not arrive, from what each of them does: pure.

Of training ranks mostly all are silent, because they wait in a collective for the one that hangs: it is the one that has not entered.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moerl.hangs.progress import BESIDE, COLLECTIVE, FIRST_GROUP, MICRO_BATCH, WAIT, WORK, Line

STOPPED = ("stopped", "tracing-stop")
_ENDED = ("gone", "zombie", "dead")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Findings of one process."""

    state: str
    """See Examined.state; "unreachable": its node did not answer. "not started": nobody knows its process."""
    clock: float = 0.0
    progress: Mapping[int, Line] = field(default_factory=dict)
    rank: int | None = None


def find_suspects(seen: Mapping[str, Seen], silent: Sequence[str]) -> dict[str, str]:
    """Those that the `silent` ones wait for, with the reason: mostly one of them, or one that is stopped or gone."""
    looked_at = [name for name, found in seen.items() if name in silent or found.state in (*STOPPED, *_ENDED)]
    broken = {name: reason for name in looked_at if (reason := _breakage(seen[name].state))}
    return broken or _behind(seen, silent) or _alone(seen, silent)


def doing(found: Seen) -> str:
    """A process's record in words: what it was doing, for how long."""
    lines, parts = found.progress, []
    for place, beside in ((WORK, ""), (BESIDE, "beside it ")):
        if (line := lines.get(place)) is not None and (line.first or place == WORK):
            parts.append(f"{beside}{'in' if line.first else 'after'} {line.text} for {_age(line, found)}")
    if (line := lines.get(MICRO_BATCH)) is not None and line.written >= lines[WORK].written:
        parts.append(f"micro-batch {line.first} of {line.second}")
    if (line := lines.get(COLLECTIVE)) is not None:
        group = lines.get(line.second) if line.second >= FIRST_GROUP else None
        where = f" of {group.text}, number {group.first}," if group is not None else ""
        parts.append(f"{'inside' if line.first else 'newest communication'} {line.text}{where} for {_age(line, found)}")
    if (line := lines.get(WAIT)) is not None and line.first and not (COLLECTIVE in lines and lines[COLLECTIVE].first):
        parts.append(f"waits for a communication that was begun before, for {_age(line, found)}")
    return "; ".join(parts)


def _breakage(state: str) -> str:
    if state in STOPPED:
        return f"its process is stopped (state {state}: a signal or a debugger did it)"
    if state in _ENDED:
        return f"its process has ended (state {state})"
    return {"unreachable": "its node does not answer", "not started": "it was not started; are there resources for it?"}.get(state, "")


def _behind(seen: Mapping[str, Seen], silent: Sequence[str]) -> dict[str, str]:
    """Those that have not entered a collective that others are in."""
    reasons: dict[str, str] = {}
    for waiting in silent:
        here = _inside(seen[waiting])
        if here is None:
            continue
        operation, group = here
        for name in silent:
            if (count := _count(seen[name], group)) is not None and count < group.first:
                reasons.setdefault(name, f"it has not entered {operation} of {group.text}, number {group.first}, in which {waiting} waits")
    free = {name: reason for name, reason in reasons.items() if not _waits(seen[name])}
    return free or reasons or _fewest(seen, silent)


def _fewest(seen: Mapping[str, Seen], silent: Sequence[str]) -> dict[str, str]:
    """Those that have entered fewer collectives of a group than others. On GPUs a collective returns when it is launched, so that nobody
    is inside one, and ranks that wait for it are in their next synchronization."""
    reasons: dict[str, str] = {}
    for text in dict.fromkeys(line.text for name in silent for place, line in seen[name].progress.items() if place >= FIRST_GROUP):
        group = Line(written=0.0, first=0, second=0, text=text)
        counts = {name: count for name in silent if (count := _count(seen[name], group)) is not None}
        most = max(counts.values())
        for name, count in counts.items():
            if count < most:
                others = f"{sum(number == most for number in counts.values())} others"
                reasons.setdefault(name, f"it has launched {count} collectives of {text}, and {others} {most}")
    return reasons


def _alone(seen: Mapping[str, Seen], silent: Sequence[str]) -> dict[str, str]:
    free = [name for name in silent if not _waits(seen[name])]
    if free and len(free) < len(silent):
        return dict.fromkeys(free, "it waits for no other, and the others do")
    if free:
        return dict.fromkeys(free, "it has not finished")
    return dict.fromkeys(silent, "it waits for the others, and no one is behind: the network, or two that wait for each other")


def _waits(found: Seen) -> bool:
    return any((line := found.progress.get(place)) is not None and line.first == 1 for place in (COLLECTIVE, WAIT))


def _inside(found: Seen) -> tuple[str, Line] | None:
    """The collective it is in, and the line of its group."""
    line = found.progress.get(COLLECTIVE)
    if line is None or not line.first or line.second < FIRST_GROUP:
        return None
    return line.text, found.progress[line.second]


def _count(found: Seen, group: Line) -> int | None:
    """How many collectives of that group it has entered; None if it is not of the group."""
    for place, line in found.progress.items():
        if place >= FIRST_GROUP and line.text == group.text:
            return line.first
    return 0 if found.rank is not None and _has(group.text, found.rank) else None


def _has(text: str, rank: int) -> bool:
    """Whether a group's text, as moerl.train.rank_progress writes it, names the rank."""
    if (evenly := re.match(r"\[(\d+)-(\d+)(?:/(\d+))?\]", text)) is not None:
        first, last, step = (int(number) if number is not None else 1 for number in evenly.groups())
        return rank in range(first, last + 1, step)
    return rank in (int(number) for number in re.findall(r"\d+", text.partition("]")[0]))


def _age(line: Line, found: Seen) -> str:
    return f"{max(found.clock - line.written, 0.0):.1f} s"
