"""Changes of settings that make a run fit its GPUs: tried by computing its memory anew, so that none is told that does not help."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moerl.config.derive.model_configs import shipped_layouts
from moerl.config.rules.facts import Facts
from moerl.config.rules.parallel_rules import broken_layout
from moerl.config.schema.memory_config import FullRecompute
from moerl.config.schema.rollout_config import ServerLayout
from moerl.config.schema.run_config import RunConfig
from moerl.planner.memory_plan import planned
from moerl.planner.rank_memory import Phase
from moerl.planner.server_memory import GIB

_NUM_FIXES = 3


@dataclass(frozen=True, slots=True)
class Change:
    text: str
    config: RunConfig


def training_fixes(config: RunConfig, facts: Facts, phases: Sequence[Phase], room: int) -> str:
    """Up to three, of different settings, after which ranks fit into `room` bytes in all of `phases`."""
    fixes: dict[frozenset[str], str] = {}
    for kind, changes in _training_changes(config, facts):
        if len(fixes) == _NUM_FIXES or any(smaller <= kind for smaller in fixes):
            continue
        if (text := _first_fitting(changes, facts.hf, phases, room)) is not None:
            fixes[kind] = text
    return "; or ".join(fixes.values()) or "more GPUs, or larger ones"


def serving_fixes(config: RunConfig, facts: Facts, phases: Sequence[Phase], room: int) -> str:
    """Those after which a server beside a rank fits."""
    layout, train = config.rollout.layout, config.train
    shares = (percent / 100 for percent in range(90, 20, -5))
    smaller = (
        Change(f"rollout.layout.memory_fraction={share:g}", _served(config, replace(layout, memory_fraction=share))) for share in shares
    )
    kinds = [smaller]
    if train.offload == "all" and not train.destroy_groups:
        ended = replace(config, train=replace(train, destroy_groups=True))
        kinds.append(Change("train.destroy_groups=true", config) for config in (ended,))
    found = (_first_fitting(changes, facts.hf, phases, room, serves=True) for changes in kinds)
    return "; or ".join(fix for fix in found if fix is not None) or "servers on GPUs of their own: placement.mode=separate"


def _served(config: RunConfig, layout: ServerLayout) -> RunConfig:
    return replace(config, rollout=replace(config.rollout, layout=layout))


def _first_fitting(
    changes: Iterator[Change], hf: Mapping[str, Any] | None, phases: Sequence[Phase], room: int, *, serves: bool = False
) -> str | None:
    """`serves`: weights of a server must leave room for keys and values."""
    assert hf is not None
    for change in changes:
        ranks, server = planned(hf, change.config)
        size = max(rank.device(phase) for rank in ranks for phase in phases)
        if size <= room and (not serves or (server is not None and server.cache > 0)):
            return f"{change.text} ({size / GIB:.1f} GiB)"
    return None


def _training_changes(config: RunConfig, facts: Facts) -> Iterator[tuple[frozenset[str], Iterator[Change]]]:
    """Kinds of changes by the settings they touch, those that cost least first; of each kind the smallest first."""
    train, model = config.train, config.model

    def trained(text: str, **values: Any) -> Change:
        return Change(text, replace(config, train=replace(train, **values)))

    def laid_out(*names: str) -> Iterator[Change]:
        for factor in (2, 4, 8, 16, 32):
            values = {name: getattr(train.layout, name) * factor for name in names}
            changed = replace(train.layout, **values)
            if not any(broken_layout(changed, facts.shape)):
                yield trained(" ".join(f"train.layout.{name}={value}" for name, value in values.items()), layout=changed)

    if not isinstance(train.recompute, FullRecompute):
        yield frozenset({"recompute"}), iter([trained("train.recompute={kind: full}", recompute=FullRecompute())])
    tokens = (train.micro_batch_tokens // 2**halvings for halvings in range(1, 10))
    fewer = (trained(f"train.micro_batch_tokens={each}", micro_batch_tokens=each) for each in tokens if each >= model.max_context)
    yield frozenset({"micro_batch_tokens"}), fewer
    names: tuple[str, ...]
    for names in (("ep",), ("pp",), ("tp",)):
        yield frozenset(names), laid_out(*names)
    memory = train.optimizer.memory
    if memory.cpu_fraction == 0 and train.offload == "none" and train.dtype == "bfloat16":
        states = replace(train.optimizer, memory=replace(memory, cpu_fraction=1.0, precision_aware=True))
        yield frozenset({"memory"}), iter([trained("train.optimizer.memory={cpu_fraction: 1.0, precision_aware: true}", optimizer=states)])
    for names in (("ranks",), ("ranks", "ep"), ("ranks", "pp")):
        yield frozenset(names), laid_out(*names)
    shipped = ((name, layout) for name, layout in shipped_layouts().items() if not any(broken_layout(layout, facts.shape)))
    yield frozenset({"layout"}), (trained(f"layout={name}", layout=layout) for name, layout in shipped)
