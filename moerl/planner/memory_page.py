"""HTML page of a memory plan: a stacked bar for every stage and phase, which letters and patterns tell apart, not colours alone."""

import json
from collections.abc import Iterator
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2

from moerl.planner.fixed_memory import GIB
from moerl.planner.memory_plan import MemoryPlan
from moerl.planner.rank_memory import RankMemory, kinds_of

_COLOURS = (
    "#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#bbbbbb", "#dd8452", "#8172b3", "#937860", "#55a868", "#c44e52",
)  # fmt: skip
_WIDTH = 820
"""Pixels of the widest bar."""
_LETTER = 11
"""Least width of a segment that shows its letter."""


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


def _classes(plan: MemoryPlan, letters: dict[str, str], scale: float) -> Iterator[dict[str, Any]]:
    """Neighbouring stages that need alike are one."""
    for _, alike in groupby(plan.ranks, key=lambda rank: (rank.phases, rank.margins)):
        ranks = list(alike)
        first, last = ranks[0].stage, ranks[-1].stage
        name = f"stage {first}" if first == last else f"stages {first} to {last}"
        yield {"name": name, "parameters": ranks[0].parameters, "bars": list(_bars(plan, ranks[0], letters, scale))}


def _bars(plan: MemoryPlan, rank: RankMemory, letters: dict[str, str], scale: float) -> Iterator[dict[str, Any]]:
    """`number` of a segment: its colour and pattern. `is_over`: more than the GPU has, with the margin."""
    for phase, kinds in rank.phases.items():
        margin, segments, x = rank.margins[phase], [], 0.0
        parts = [(kind, letter, kinds.get(kind, 0)) for kind, letter in letters.items()]
        for number, (kind, letter, size) in enumerate([*parts, ("margin", "", margin)]):
            if size or not letter:
                width, gib = size * scale, size / GIB
                shown = letter if width >= _LETTER else ""
                segments.append({"kind": kind, "number": number, "x": x, "width": width, "gib": gib, "shown": shown})
                x += width
        together = rank.device(phase) + margin
        is_over = plan.gpu_bytes is not None and together > plan.gpu_bytes
        sizes = {"gib": rank.device(phase) / GIB, "with_margin": together / GIB}
        yield {"phase": phase, "is_over": is_over, "segments": segments, **sizes}
