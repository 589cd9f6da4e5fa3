"""Changes of settings that make a run fit its GPUs: tried by computing its memory anew, so that none is told that does not help."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moerl.config.derive.model_configs import shipped_layouts
from moerl.config.rules.facts import Facts, Rule
from moerl.config.rules.fp8_rules import fp8_problems
from moerl.config.rules.megatron_rules import megatron_problems
from moerl.config.rules.memory_rules import memory_problems
from moerl.config.rules.model_rules import length_problems
from moerl.config.rules.parallel_rules import broken_layout, train_layout_problems
from moerl.config.rules.placement_rules import placement_problems
from moerl.config.rules.run_rules import micro_batch_problems, optimizer_problems
from moerl.config.rules.server_layout_rules import layout_problems
from moerl.config.schema.rollout_config import ServerLayout, WeightsConfig
from moerl.config.schema.run_config import RunConfig
from moerl.config.schema.train_config import FullRecompute, SelectiveRecompute
from moerl.planner.fixed_memory import GIB
from moerl.planner.memory_plan import planned
from moerl.planner.rank_memory import Phase

_NUM_FIXES = 3


@dataclass(frozen=True, slots=True)
class Change:
    text: str
    config: RunConfig


_CHECKED: tuple[Rule, ...] = (
    length_problems, micro_batch_problems, train_layout_problems, optimizer_problems, memory_problems, layout_problems, megatron_problems,
    fp8_problems, placement_problems,
)  # fmt: skip
"""Rules that a change may break, but for those that ask an engine."""
_BUCKET_BYTES = WeightsConfig.bucket_bytes
"""As it is by default."""


def training_fixes(config: RunConfig, facts: Facts, phases: Sequence[Phase], room: int) -> str:
    """Up to three, of different settings, after which ranks fit into `room` bytes in all of `phases`."""
    fixes: dict[frozenset[str], str] = {}
    for kind, changes in _training_changes(config, facts):
        if len(fixes) == _NUM_FIXES or any(smaller <= kind for smaller in fixes):
            continue
        if (text := _first_fitting(changes, config, facts, phases, room)) is not None:
            fixes[kind] = text
    return "; or ".join(fixes.values()) or "more GPUs, or larger ones"


def serving_fixes(config: RunConfig, facts: Facts, phases: Sequence[Phase], room: int) -> str:
    """Those after which a server beside a rank fits."""
    layout, train = config.rollout.layout, config.train
    shares = (percent / 100 for percent in range(90, 20, -5))
    smaller = (
        Change(f"rollout.layout.memory_fraction={share:g}", _served(config, replace(layout, memory_fraction=share))) for share in shares
    )
    kinds = [iter(_smaller_buckets(config)), smaller]
    if train.offload == "all" and not train.destroy_groups:
        ended = replace(config, train=replace(train, destroy_groups=True))
        kinds.append(Change("train.destroy_groups=true", config) for config in (ended,))
    found = (_first_fitting(changes, config, facts, phases, room, serves=True) for changes in kinds)
    return "; or ".join(fix for fix in found if fix is not None) or "servers on GPUs of their own: placement.mode=separate"


def _smaller_buckets(config: RunConfig) -> list[Change]:
    if config.weights.bucket_bytes <= _BUCKET_BYTES:
        return []
    return [Change(f"weights.bucket_bytes={_BUCKET_BYTES}", replace(config, weights=replace(config.weights, bucket_bytes=_BUCKET_BYTES)))]


def _served(config: RunConfig, layout: ServerLayout) -> RunConfig:
    return replace(config, rollout=replace(config.rollout, layout=layout))


def _first_fitting(
    changes: Iterator[Change], config: RunConfig, facts: Facts, phases: Sequence[Phase], room: int, *, serves: bool = False
) -> str | None:
    """`serves`: weights of a server must leave room for keys and values. A change that breaks a rule is none."""
    assert facts.hf is not None
    broken = _broken(config, facts)
    for change in changes:
        ranks, server = planned(facts.hf, change.config)
        size = max(rank.device(phase) for rank in ranks for phase in phases)
        if size <= room and (not serves or (server is not None and server.cache > 0)) and _broken(change.config, facts) <= broken:
            return f"{change.text} ({size / GIB:.1f} GiB)"
    return None


def _training_changes(config: RunConfig, facts: Facts) -> Iterator[tuple[frozenset[str], Iterator[Change]]]:
    """Kinds of changes by the settings they touch, those that cost least first; of each kind the smallest first."""
    train, model = config.train, config.model

    def trained(text: str, **values: Any) -> Change:
        return Change(text, replace(config, train=replace(train, **values)))

    def laid_out(*names: str, factors: Sequence[int] = (2, 4, 8, 16, 32)) -> Iterator[Change]:
        for factor in factors:
            values = {name: getattr(train.layout, name) * factor for name in names}
            changed = replace(train.layout, **values)
            if any(broken_layout(changed, facts.shape)):
                continue
            change = trained(" ".join(f"train.layout.{name}={value}" for name, value in values.items()), layout=changed)
            yield _on_nodes(change, factor) if "ranks" in names else change

    yield frozenset({"bucket_bytes"}), iter(_smaller_buckets(config))
    if not isinstance(train.recompute, FullRecompute):
        others = ", and no train.recompute.modules" if isinstance(train.recompute, SelectiveRecompute) else ""
        yield frozenset({"recompute"}), iter([trained(f"train.recompute={{kind: full}}{others}", recompute=FullRecompute())])
    tokens = (train.micro_batch_tokens // 2**halvings for halvings in range(1, 10))
    fewer = (trained(f"train.micro_batch_tokens={each}", micro_batch_tokens=each) for each in tokens if each >= model.max_context)
    yield frozenset({"micro_batch_tokens"}), fewer
    names: tuple[str, ...]
    for names in (("ep",), ("pp",), ("tp",)):
        yield frozenset(names), laid_out(*names)
    memory = train.optimizer.memory
    if memory.cpu_fraction == 0 and train.dtype == "bfloat16":
        states = replace(train.optimizer, memory=replace(memory, cpu_fraction=1.0, precision_aware=True))
        yield frozenset({"memory"}), iter([trained("train.optimizer.memory={cpu_fraction: 1.0, precision_aware: true}", optimizer=states)])
    for names in (("ranks",), ("ranks", "ep"), ("ranks", "pp")):
        yield frozenset(names), laid_out(*names, factors=(2, 4))
    shipped = ((name, layout) for name, layout in shipped_layouts().items() if not any(broken_layout(layout, facts.shape)))
    yield frozenset({"layout"}), (trained(f"layout={name}, and no train.layout.*", layout=layout) for name, layout in shipped)


def _on_nodes(change: Change, factor: int) -> Change:
    """The same on so many times the nodes."""
    placement = change.config.placement
    if placement.gpus_per_node is None:
        return change
    more = replace(placement, nodes=placement.nodes * factor)
    return Change(f"{change.text} placement.nodes={more.nodes}", replace(change.config, placement=more))


def _broken(config: RunConfig, facts: Facts) -> set[str]:
    return {problem.path for rule in _CHECKED for problem in rule(config, facts)}
