"""Verdict on settings by `placement.gpu`: what its memory, its FP8 formats or its NVLink cannot carry is refused before anything starts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from moerl.config.derive.model_configs import shipped_layouts
from moerl.config.rules.facts import Facts
from moerl.config.rules.parallel_rules import broken_layout
from moerl.config.schema.hardware_config import GpuConfig
from moerl.config.schema.memory_config import FullRecompute
from moerl.config.schema.run_config import RunConfig
from moerl.planner.memory import GIB, RankMemory, rank_memory, server_memory
from moerl.types.errors import Problem, problem

_CAPABILITY = {"blockwise": 9.0, "mxfp8": 10.0, "tensorwise": 8.9, "delayed": 8.9}
"""Least compute capability of each FP8 recipe (transformer_engine/pytorch/quantization.py, check_*_support)."""
_NUM_FIXES = 3


@dataclass(frozen=True, slots=True)
class _Change:
    text: str
    config: RunConfig


def gpu_problems(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """Nothing where placement.gpu is None, the model is not known, or the layout breaks a rule of its own."""
    gpu, hf = config.placement.gpu, facts.hf
    if gpu is None:
        return
    yield from _format_problems(config, gpu)
    yield from _domain_problems(config, gpu)
    if hf is not None and facts.shape is not None and not any(broken_layout(config.train.layout, facts.shape)):
        yield from _rank_problems(config, facts, hf, gpu)
        yield from _server_problems(config, hf, gpu)


def _format_problems(config: RunConfig, gpu: GpuConfig) -> Iterator[Problem]:
    fp8 = config.train.fp8
    if fp8 is not None and gpu.capability < _CAPABILITY[fp8.recipe]:
        rule = f"needs compute capability {_CAPABILITY[fp8.recipe]}, and {gpu.name} has {gpu.capability}"
        others = [name for name, least in _CAPABILITY.items() if least <= gpu.capability]
        fix = "train.fp8=null" if not others else f"train.fp8.recipe={' or '.join(others)}, or train.fp8=null"
        yield problem("train.fp8.recipe", fp8.recipe, rule, "Transformer Engine refuses it there, in every rank", fix)


def _domain_problems(config: RunConfig, gpu: GpuConfig) -> Iterator[Problem]:
    placement = config.placement
    joined = placement.nodes_per_domain * (placement.gpus_per_node or 1)
    if placement.nodes_per_domain > 1 and joined > gpu.gpus_per_domain:
        most = max(1, gpu.gpus_per_domain // (placement.gpus_per_node or 1))
        rule = f"would join {joined} GPUs by NVLink, and {gpu.name} joins {gpu.gpus_per_domain}"
        reason = "groups would be placed as if what is between them were NVLink"
        yield problem("placement.nodes_per_domain", placement.nodes_per_domain, rule, reason, f"placement.nodes_per_domain={most}")


def _rank_problems(config: RunConfig, facts: Facts, hf: Mapping[str, Any], gpu: GpuConfig) -> Iterator[Problem]:
    worst, room = _worst(hf, config), gpu.memory_mib * 2**20
    if worst.device <= room:
        return
    rule = (
        f"needs at least {worst.device / GIB:.1f} GiB on each rank of pipeline stage {worst.stage} during an update, "
        f"{(worst.device - room) / GIB:.1f} more than the {room / GIB:.1f} of {gpu.name}"
    )
    reason = f"GiB: {worst}; activations within a layer, NCCL's buffers and CUDA come on top"
    fixes: dict[frozenset[str], str] = {}
    for kind, changes in _changes(config, facts):
        if len(fixes) == _NUM_FIXES or any(smaller <= kind for smaller in fixes):
            continue
        if (text := next(_fitting(changes, hf, room), None)) is not None:
            fixes[kind] = text
    layout = config.train.layout
    value = f"ranks {layout.ranks}, tp {layout.tp}, pp {layout.pp}, cp {layout.cp}, ep {layout.ep}, etp {layout.etp}"
    yield problem("train.layout", value, rule, reason, "; or ".join(fixes.values()) or "more GPUs, or larger ones")


def _worst(hf: Mapping[str, Any], config: RunConfig) -> RankMemory:
    return max(rank_memory(hf, config), key=lambda each: each.device)


def _fitting(changes: Iterator[_Change], hf: Mapping[str, Any], room: int) -> Iterator[str]:
    for change in changes:
        if (size := _worst(hf, change.config).device) <= room:
            yield f"{change.text} ({size / GIB:.1f} GiB)"


def _changes(config: RunConfig, facts: Facts) -> Iterator[tuple[frozenset[str], Iterator[_Change]]]:
    """Kinds of changes by the settings they touch, those that cost least first; of each kind the smallest first."""
    train, model = config.train, config.model

    def trained(text: str, **values: Any) -> _Change:
        return _Change(text, replace(config, train=replace(train, **values)))

    def laid_out(*names: str) -> Iterator[_Change]:
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


def _server_problems(config: RunConfig, hf: Mapping[str, Any], gpu: GpuConfig) -> Iterator[Problem]:
    if config.rollout.engine not in ("vllm", "sglang"):
        return
    layout = config.rollout.layout
    if layout.gpus % layout.dp or layout.gpus % layout.ep:
        return  # reported by validation
    found = server_memory(hf, config)
    assert found.available is not None
    if found.weights < found.available:
        return
    share = "" if layout.memory_fraction is None else f"{layout.memory_fraction:g} of "
    rule = (
        f"needs at least {found.weights / GIB:.1f} GiB for the weights on each GPU of a server, and {share}{gpu.name} "
        f"has {found.available / GIB:.1f}"
    )
    wider = next((factor for factor in (2, 4, 8, 16, 32, 64) if _server_bytes(config, hf, factor) < 0.9 * found.available), None)
    gpus = None if wider is None else layout.gpus * wider
    fix = "larger GPUs: hardware=h200" if gpus is None else f"rollout.layout.gpus={gpus}, with ep={gpus} for experts, and fewer servers"
    yield problem("rollout.layout.gpus", layout.gpus, rule, "keys and values, and what the engine computes with, come on top", fix)


def _server_bytes(config: RunConfig, hf: Mapping[str, Any], factor: int) -> int:
    layout = config.rollout.layout
    wider = replace(layout, gpus=layout.gpus * factor, ep=layout.ep * factor)
    return server_memory(hf, replace(config, rollout=replace(config.rollout, layout=wider))).weights
