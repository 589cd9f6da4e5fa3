"""HTML page of a memory plan: a stacked bar for every stage and phase, which letters and patterns tell apart, not colours alone."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import jinja2

from moerl.planner.fixed_memory import GIB
from moerl.planner.memory_plan import MemoryPlan
from moerl.planner.rank_memory import RankMemory, kinds_of

_COLOURS = (
    "#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#bbbbbb", "#dd8452", "#8172b3", "#937860", "#55a868", "#c44e52",
)  # fmt: skip
_MARGIN = "margin"
_WIDTH = 820
"""Pixels of the widest bar."""
_LETTER = 11
"""Least width of a segment that shows its letter."""


@dataclass(frozen=True, slots=True)
class _Segment:
    kind: str
    letter: str
    number: int
    """Its colour and pattern."""
    x: float
    width: float
    gib: float

    @property
    def shown(self) -> str:
        return self.letter if self.width >= _LETTER else ""


@dataclass(frozen=True, slots=True)
class _Bar:
    phase: str
    gib: float
    with_margin: float
    is_over: bool
    """More than the GPU has, with the margin."""
    segments: tuple[_Segment, ...]


@dataclass(frozen=True, slots=True)
class _Class:
    """Ranks that need alike."""

    name: str
    parameters: int
    bars: tuple[_Bar, ...]


def write_plan(plan: MemoryPlan, json_file: Path | None, html_file: Path | None) -> None:
    """Writes those that are given."""
    texts = ((json_file, lambda: json.dumps(plan.to_json(), indent=1) + "\n"), (html_file, lambda: page(plan)))
    for file, text in texts:
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text(), encoding="utf-8")


def page(plan: MemoryPlan) -> str:
    letters = dict(zip(kinds_of(plan.ranks), "ABCDEFGHIJKLMNOPQRSTUVWXYZ", strict=False))
    most = max([rank.most_with_margin for rank in plan.ranks] + ([] if plan.gpu_bytes is None else [plan.gpu_bytes]))
    scale = _WIDTH / most
    template = resources.files("moerl.planner").joinpath("memory_page.html.j2").read_text()
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(
        plan=plan,
        gib=GIB,
        limit=None if plan.gpu_bytes is None else plan.gpu_bytes * scale,
        width=_WIDTH,
        colours=_COLOURS,
        legend=[(kind, letter, number) for number, (kind, letter) in enumerate(letters.items())],
        classes=list(_classes(plan, letters, scale)),
        node=plan.worst_node if plan.nodes else None,
        text=str(plan),
    )


def _classes(plan: MemoryPlan, letters: dict[str, str], scale: float) -> Iterator[_Class]:
    """Neighbouring stages that need alike are one."""
    ranks = list(plan.ranks)
    while ranks:
        alike = 1
        while alike < len(ranks) and (ranks[alike].phases, ranks[alike].margins) == (ranks[0].phases, ranks[0].margins):
            alike += 1
        first, last = ranks[0].stage, ranks[alike - 1].stage
        name = f"stage {first}" if first == last else f"stages {first} to {last}"
        yield _Class(name, ranks[0].parameters, tuple(_bars(plan, ranks[0], letters, scale)))
        del ranks[:alike]


def _bars(plan: MemoryPlan, rank: RankMemory, letters: dict[str, str], scale: float) -> Iterator[_Bar]:
    numbers = {kind: number for number, kind in enumerate(letters)}
    for phase in rank.phases:
        segments, x = [], 0.0
        for kind, size in rank.phases[phase].items():
            if size:
                segments.append(_Segment(kind, letters[kind], numbers[kind], x, size * scale, size / GIB))
                x += size * scale
        margin = rank.margins[phase]
        segments.append(_Segment(_MARGIN, "", len(letters), x, margin * scale, margin / GIB))
        together = rank.device(phase) + margin
        is_over = plan.gpu_bytes is not None and together > plan.gpu_bytes
        yield _Bar(phase, rank.device(phase) / GIB, together / GIB, is_over, tuple(segments))
