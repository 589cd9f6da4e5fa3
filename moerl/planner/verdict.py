"""Verdict on settings by `placement.gpu`: what its memory, its FP8 formats or its NVLink cannot carry is refused before anything starts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from moerl.config.derive.companion_models import companion_models
from moerl.config.derive.gpu_map import num_gpus, num_shared
from moerl.config.rules.algorithm_rules import custom_problems
from moerl.config.rules.companion_rules import companion_problems
from moerl.config.rules.facts import Facts
from moerl.config.rules.parallel_rules import broken_layout
from moerl.config.rules.server_layout_rules import layout_problems, start_problems
from moerl.config.schema.job_config import GpuConfig
from moerl.config.schema.run_config import RunConfig
from moerl.planner.fixed_memory import GIB
from moerl.planner.fixes import serving_fixes, training_fixes
from moerl.planner.memory_plan import planned
from moerl.planner.node_memory import NodeMemory, node_memory
from moerl.planner.rank_memory import DURING, PHASES, Phase, RankMemory, companion_memory, worst_rank
from moerl.planner.server_memory import ServerMemory, server_memory
from moerl.types.errors import ConfigError, Problem, problem

_CAPABILITY = {"blockwise": 9.0, "mxfp8": 10.0, "tensorwise": 8.9, "delayed": 8.9}
"""Least compute capability of each FP8 recipe (transformer_engine/pytorch/quantization.py, check_*_support)."""
_MOST_EMPTY = 16
"""Times the GPUs that a run needs: nodes of a larger placement are not looked at."""
_SERVING: tuple[Phase, ...] = ("rollout", "push")
_TRAINING: tuple[Phase, ...] = ("load", "log-probs", "companions", "update", "save")


def gpu_problems(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """Nothing where placement.gpu is None, the model is not known, or the layout breaks a rule of its own."""
    gpu, hf = config.placement.gpu, facts.hf
    if gpu is None:
        return
    if any(custom_problems(config.algorithm)) or any(companion_problems(config, facts)):
        return  # what they need is not known
    yield from _format_problems(config, gpu)
    yield from _domain_problems(config, gpu)
    is_placed = config.placement.mode != "group_colocated" or config.placement.num_shared is not None  # else reported by validation
    if hf is not None and facts.shape is not None and is_placed and not any(broken_layout(config.train.layout, facts.shape)):
        found = [*_rank_problems(config, facts, hf, gpu), *_companion_problems(config, hf, gpu), *_server_problems(config, facts, hf, gpu)]
        yield from found or _host_problems(config, hf, gpu)  # what mends the GPUs changes the nodes


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
    """Phases in which the trainer needs too much; then of those in which a server on the same GPU does."""
    ranks, server = planned(hf, config)
    beside = server if num_shared(config) > 0 else None
    shares = beside is not None and beside.cache > 0  # else it fits nowhere, which _server_problems tells
    training = PHASES if beside is None else _TRAINING
    worst, phase = _worst(ranks, training)
    if worst.device(phase) <= gpu.memory_bytes:
        serving = _SERVING
    else:
        rule, reason = _told(worst, phase, gpu)
        layout = config.train.layout
        value = f"ranks {layout.ranks}, tp {layout.tp}, pp {layout.pp}, cp {layout.cp}, ep {layout.ep}, etp {layout.etp}"
        yield problem("train.layout", value, rule, reason, training_fixes(config, facts, training, gpu.memory_bytes))
        serving = ("rollout",)  # less to train with is less to push
    worst, phase = _worst(ranks, serving)
    if shares and worst.device(phase) > gpu.memory_bytes:
        rule, reason = _told(worst, phase, gpu)
        fix = serving_fixes(config, facts, _SERVING, gpu.memory_bytes)
        yield problem("rollout.layout.memory_fraction", config.rollout.layout.memory_fraction, rule, reason, fix)


def _companion_problems(config: RunConfig, hf: Mapping[str, Any], gpu: GpuConfig) -> Iterator[Problem]:
    """Problems of those on ranks of their own."""
    for model in companion_models(config):
        if model.layout is None:
            continue
        worst = worst_rank(companion_memory(hf, config, model))
        if worst.most > gpu.memory_bytes:
            rule, reason = _told(worst, worst.worst, gpu)
            yield problem(f"{model.section}.layout.ranks", model.layout.ranks, rule, reason, "more ranks, over more tp, pp or ep")


def _worst(ranks: Sequence[RankMemory], phases: Sequence[Phase]) -> tuple[RankMemory, Phase]:
    return max(((rank, phase) for rank in ranks for phase in phases), key=lambda pair: pair[0].device(pair[1]))


def _told(rank: RankMemory, phase: Phase, gpu: GpuConfig) -> tuple[str, str]:
    """(rule, reason)"""
    size, room = rank.device(phase), gpu.memory_bytes
    rule = (
        f"needs {size / GIB:.1f} GiB on each rank of pipeline stage {rank.stage}, {rank.ranks[0]} to {rank.ranks[-1]}, {DURING[phase]}: "
        f"{(size - room) / GIB:.1f} more than the {room / GIB:.1f} of {gpu.name}"
    )
    return rule, "GiB: " + ", ".join(f"{kind} {held / GIB:.3g}" for kind, held in rank.phases[phase].items() if held)


def _server_problems(config: RunConfig, facts: Facts, hf: Mapping[str, Any], gpu: GpuConfig) -> Iterator[Problem]:
    if not config.rollout.traits.has_environment:
        return
    layout = config.rollout.layout
    if layout.gpus % layout.dp or layout.gpus % layout.ep:
        return  # reported by validation
    found = server_memory(hf, config)
    assert found.available is not None
    if found.cache > 0:
        if found.requests(config.model.max_context) == 0:
            yield _cache_problem(config, found, gpu)
        return
    share = "" if layout.memory_fraction is None else f"{layout.memory_fraction:g} of "
    rule = (
        f"needs at least {found.weights / GIB:.1f} GiB for the weights on each GPU of a server, and {share}{gpu.name} "
        f"has {found.available / GIB:.1f}"
    )
    fix = next(_wider_servers(config, facts, hf, round(0.9 * found.available)), "larger GPUs")
    yield problem("rollout.layout.gpus", layout.gpus, rule, "keys and values, and what the engine computes with, come on top", fix)


def _wider_servers(config: RunConfig, facts: Facts, hf: Mapping[str, Any], room: int) -> Iterator[str]:
    """Numbers of GPUs over which the weights take less than `room` bytes on each, and which break no rule that is not broken now."""
    assert facts.shape is not None
    layout, broken = config.rollout.layout, _broken_of_servers(config, facts)
    for factor in (2, 4, 8, 16, 32, 64):
        gpus = layout.gpus * factor
        wider = replace(layout, gpus=gpus, ep=1 if facts.shape.num_experts is None else gpus)
        changed = replace(config, rollout=replace(config.rollout, layout=wider))
        if server_memory(hf, changed).weights < room and _broken_of_servers(changed, facts) <= broken:
            with_experts = "" if wider.ep == 1 else f" with ep={gpus} for experts,"
            yield f"rollout.layout.gpus={gpus},{with_experts} and fewer servers"


def _broken_of_servers(config: RunConfig, facts: Facts) -> set[str]:
    """Settings of servers that break a rule, those too that only a start refuses."""
    return {found.path for found in (*layout_problems(config, facts), *start_problems(config, facts))}


def _cache_problem(config: RunConfig, found: ServerMemory, gpu: GpuConfig) -> Problem:
    context, layout = config.model.max_context, config.rollout.layout
    rule = (
        f"leaves {found.cache / GIB:.3g} GiB of {gpu.name} for keys and values, and one request of model.max_context={context} tokens "
        f"takes {found.token * context / GIB:.3g}"
    )
    fix = f"more rollout.layout.gpus, or rollout.layout.kv_cache=fp8; now gpus {layout.gpus}, dp {layout.dp}"
    return problem("rollout.layout.memory_fraction", layout.memory_fraction, rule, "no request could be answered to its end", fix)


def _host_problems(config: RunConfig, hf: Mapping[str, Any], gpu: GpuConfig) -> Iterator[Problem]:
    placement = config.placement
    if gpu.host_memory_gib is None or placement.gpus_per_node is None:
        return
    if placement.nodes * placement.gpus_per_node > _MOST_EMPTY * num_gpus(config):
        return  # mapping all of them takes long
    try:
        worst = _worst_node(config, hf)
    except ConfigError:  # who has no GPU is reported by validation
        return
    if worst.total <= gpu.host_memory_gib * GIB:
        return
    kinds = ", ".join(f"{kind} {held / GIB:.0f}" for kind, held in worst.kinds.items())
    rule = f"node {worst.node} needs {worst.total / GIB:.0f} GiB of host memory"
    fixes = []
    if config.checkpoint.async_save:
        after = _worst_node(replace(config, checkpoint=replace(config.checkpoint, async_save=False)), hf)
        if after.total <= gpu.host_memory_gib * GIB:
            fixes.append(f"checkpoint.async_save=false ({after.total / GIB:.0f} GiB)")
    fixes.append("more nodes for the same model, or less in train.offload or train.optimizer.memory.cpu_fraction")
    yield problem("placement.gpu.host_memory_gib", gpu.host_memory_gib, rule, f"GiB: {kinds}", "; or ".join(fixes))


def _worst_node(config: RunConfig, hf: Mapping[str, Any]) -> NodeMemory:
    ranks, server = planned(hf, config)
    return max(node_memory(hf, config, ranks, server), key=lambda node: node.total)
