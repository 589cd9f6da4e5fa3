"""Planned memory beside what a run measured, or what was on a GPU when it was full: by kind, with what grew most."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from moerl.config.derive.companion_models import companion_models
from moerl.config.derive.model_configs import model_config
from moerl.config.load import checked
from moerl.config.schema.run_config import RunConfig
from moerl.observe.failure import chain_of
from moerl.observe.records import metrics_path, read_metrics, trained_rows
from moerl.planner.fixed_memory import GIB
from moerl.planner.memory_plan import aligned, planned
from moerl.planner.rank_memory import Phase, RankMemory, companion_memory
from moerl.types.errors import MoerlError, OutOfDeviceMemory, ReportError

_PHASES: Mapping[str, Phase] = {
    "logprobs": "log-probs", "reference_logprobs": "log-probs", "values": "log-probs", "export": "push", "update": "update", "save": "save",
    "load": "load",
}  # fmt: skip
"""By a rank's verb (moerl/train/memory/memory_states.py)."""
_STATIC = ("weights", "reference", "gradients", "optimizer")
_OUTSIDE = ("NCCL", "CUDA", "server")
ELSE, GAPS, OUTSIDE = "all else allocated", "between allocations", "outside of PyTorch"
"""Activations, logits, copies and buffers; what PyTorch holds and has not given out; NCCL, CUDA and other processes."""


@dataclass(frozen=True, slots=True)
class Compared:
    kind: str
    planned: int
    found: int | None
    """None: it was not measured."""

    @property
    def growth(self) -> int:
        return 0 if self.found is None else self.found - self.planned

    def cells(self) -> list[str]:
        found = "-" if self.found is None else f"{self.found / GIB:.3f}"
        ratio = "-" if not self.found or not self.planned else f"{self.found / self.planned:.3f}"
        return [self.kind, f"{self.planned / GIB:.3f}", found, ratio]


def compared(run_dir: Path) -> str:
    """Plan of a run's own settings beside its metrics, for people. ReportError for a directory that is none, or without a step."""
    source, settings = metrics_path(run_dir), run_dir / "config.yaml"
    if not source.is_file() or not settings.is_file():
        rule = "must hold config.yaml and metrics.jsonl, which a run writes until its first step is over"
        raise ReportError(f"{run_dir} = no run directory with a step: {rule}. Name the directory of a run (output_dir/name).")
    rows = trained_rows(read_metrics(source))
    try:
        plain = yaml.safe_load(settings.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ReportError(f"{settings} = damaged: must be YAML, as the run wrote it: {str(error).splitlines()[0]}") from error
    config = checked(plain if isinstance(plain, dict) else {})
    ranks, _ = planned(model_config(config.model), config)
    most: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith("memory/") and isinstance(value, int | float) and math.isfinite(value):
                most[name] = max(value, most.get(name, 0.0))
    rank = max(ranks, key=lambda each: sum(each.phases["update"].get(kind, 0) for kind in _STATIC))
    found = [*_update_rows(rank, most), *_host_rows(config, rank, most)]
    title = f"memory of the rank that holds most, planned as one of stage {rank.stage}, and as measured in {len(rows)} steps; GiB"
    return "\n".join([title, *_lines(found)])


@contextmanager
def explained(config: RunConfig) -> Iterator[None]:
    """Context in which an error that began with a full GPU gets a note of what was planned for it."""
    try:
        yield
    except MoerlError as error:
        full = next((each for each in chain_of(error) if isinstance(each, OutOfDeviceMemory)), None)
        if full is not None:
            error.add_note(told_against_plan(config, full))
        raise


def told_against_plan(config: RunConfig, error: OutOfDeviceMemory) -> str:
    """Plan for the rank whose GPU was full, beside what was on it."""
    hf, phase = model_config(config.model), _PHASES[error.call]
    model = next((each for each in companion_models(config) if each.name == error.model), None)
    whose = "" if model is None else f" of {model.name}"
    title = f"planned for a rank{whose} of stage {error.stage} in {error.call}, and found; GiB (docs/design/memory.md)"
    if model is not None and model.layout is None:
        # Kinds are told of this model alone, and the policy is on the same GPU.
        kinds = planned(hf, config)[0][error.stage].phases["companions"]
        rows = [Compared("all of the GPU", sum(kinds.values()), sum(error.held.values()))]
        return "\n".join([title, *_lines(rows)])
    ranks = planned(hf, config)[0] if model is None else companion_memory(hf, config, model)
    kinds = ranks[error.stage].phases[phase]
    known = {kind: error.held[kind] for kind in (*_STATIC, ELSE, GAPS, OUTSIDE) if kind in error.held}
    rows = [Compared(kind, _planned(kinds, kind), size) for kind, size in known.items()]
    return "\n".join([title, *_lines(rows)])


def _planned(kinds: Mapping[str, int], kind: str) -> int:
    if kind == ELSE:
        return sum(size for name, size in kinds.items() if name not in (*_STATIC, *_OUTSIDE))
    if kind == OUTSIDE:
        return sum(kinds.get(name, 0) for name in _OUTSIDE)
    return kinds.get(kind, 0)


def _update_rows(rank: RankMemory, most: Mapping[str, float]) -> Iterator[Compared]:
    kinds = rank.phases["update"]
    names = {kind: f"memory/device/training/{'parameters' if kind == 'weights' else kind}" for kind in _STATIC}
    held = 0
    for kind, name in names.items():
        held += (size := int(most.get(name, 0)))
        if size or kinds.get(kind):
            yield Compared(kind, _planned(kinds, kind), size if most else None)
    peaks = (most.get(f"memory/peak/{name}") for name in ("allocated", "reserved", "used"))
    allocated, reserved, used = (None if size is None else int(size) for size in peaks)
    yield Compared(ELSE, _planned(kinds, ELSE), None if allocated is None else allocated - held)
    yield Compared(GAPS, rank.margins["update"], None if allocated is None or reserved is None else reserved - allocated)
    yield Compared(OUTSIDE, _planned(kinds, OUTSIDE), None if reserved is None or used is None else used - reserved)


def _host_rows(config: RunConfig, rank: RankMemory, most: Mapping[str, float]) -> Iterator[Compared]:
    copies = sum(int(size) for name, size in most.items() if name.startswith("memory/host/"))
    # Of the policy alone, while the plan has all models of its ranks.
    is_measured = bool(most) and all(model.layout is not None for model in companion_models(config))
    yield Compared("host: copies of what leaves the GPU", rank.host["copies of what leaves the GPU"], copies if is_measured else None)
    process = most.get("memory/peak/process")
    yield Compared("host: the whole process", sum(rank.host.values()), None if process is None else int(process))


def _lines(rows: list[Compared]) -> Iterator[str]:
    yield from aligned([["", "planned", "found", "found / planned"], *(row.cells() for row in rows)])
    grown = max(rows, key=lambda row: row.growth, default=None)
    if grown is not None and grown.growth > 0:
        yield f"most over the plan: {grown.kind}, by {grown.growth / GIB:.3g} GiB"
