"""Memory that a run needs, by rank, server and node, as one plan: for people as a table, for programs as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moerl.config.derive.gpu_map import num_shared
from moerl.config.derive.model_configs import model_config
from moerl.config.rules.facts import facts_of
from moerl.config.schema.run_config import RunConfig
from moerl.planner.fixed_memory import GIB
from moerl.planner.layer_activations import megatron_release
from moerl.planner.node_memory import NodeMemory, checkpoint_bytes, node_memory
from moerl.planner.rank_memory import (
    DURING,
    FRAGMENTATION,
    IMBALANCE,
    Phase,
    RankMemory,
    companions_memory,
    kinds_of,
    rank_memory,
    worst_rank,
)
from moerl.planner.server_memory import ServerMemory, server_memory

VERSION = 1
"""Number of the form of `to_json`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    name: str
    """The run's."""
    gpu: str | None
    gpu_bytes: int | None
    host_bytes: int | None
    """Host memory of a node; None: nothing says how much there is."""
    ranks: Sequence[RankMemory]
    beside: Mapping[str, RankMemory]
    """Worst rank of models beside the policy that have their own, by their names."""
    server: ServerMemory | None
    """None: servers use no GPUs."""
    max_context: int
    max_running: int
    nodes: Sequence[NodeMemory]
    checkpoint_bytes: int
    num_checkpoints: int
    """On disk at once: those that are kept, and one being written."""

    @property
    def worst(self) -> RankMemory:
        return worst_rank(list(self.ranks))

    @property
    def worst_node(self) -> NodeMemory:
        return max(self.nodes, key=lambda node: node.total)

    def to_json(self) -> dict[str, Any]:
        """Bytes everywhere. `ranks`: by pipeline stage; `phases`: by kind."""
        server = self.server
        return {
            "version": VERSION,
            "name": self.name,
            "gpu": self.gpu,
            "gpu_bytes": self.gpu_bytes,
            "worst": {"stage": self.worst.stage, "phase": self.worst.worst, "bytes": self.worst.most},
            "ranks": [
                {
                    "stage": rank.stage,
                    "parameters": rank.parameters,
                    "phases": {phase: _some(rank.phases[phase]) for phase in rank.phases},
                    "margins": dict(rank.margins),
                    "host": _some(rank.host),
                }
                for rank in self.ranks
            ],
            "beside": {name: {"stage": rank.stage, "bytes": rank.most} for name, rank in self.beside.items()},
            "server": None
            if server is None
            else {
                "weights": server.weights,
                "token": server.token,
                "available": server.available,
                "requests_of_max_context": None if server.available is None else server.requests(self.max_context),
            },
            "nodes": [{"node": node.node, "stages": list(node.stages), "kinds": dict(node.kinds)} for node in self.nodes],
            "host_bytes": self.host_bytes,
            "checkpoint_bytes": self.checkpoint_bytes,
            "num_checkpoints": self.num_checkpoints,
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        of = "" if self.gpu_bytes is None else f" of {self.gpu_bytes / GIB:.1f} on {self.gpu}"
        major, minor = megatron_release()
        yield f"memory of a rank with Megatron-Core {major}.{minor}, GiB{of} (docs/design/memory.md)"
        yield from aligned(_update_rows(self.ranks))
        yield ""
        yield f"by phase, GiB; margin: {IMBALANCE:g} times the tokens at the busiest experts, and {FRAGMENTATION:.0%} between allocations"
        yield from aligned(_phase_rows(self.ranks))
        yield from self._beside_lines()
        if self.server is not None:
            yield ""
            yield from self._server_lines(self.server)
        if self.nodes:
            yield ""
            node = self.worst_node
            of = "" if self.host_bytes is None else f" of {self.host_bytes / GIB:.0f}"
            yield f"host memory     {node.total / GIB:.0f}{of} GiB on node {node.node}: {_told(node.kinds)}"
        total = self.checkpoint_bytes * self.num_checkpoints
        yield f"checkpoint      {self.checkpoint_bytes / 1e9:.0f} GB, {self.num_checkpoints} at once on disk: {total / 1e9:.0f} GB"

    def _beside_lines(self) -> Iterator[str]:
        for name, rank in self.beside.items():
            kinds = _told(rank.phases[rank.worst])
            yield f"{name:15} {rank.most / GIB:.1f} GiB on a rank of its own of stage {rank.stage}, {DURING[rank.worst]}: {kinds}"

    def _server_lines(self, server: ServerMemory) -> Iterator[str]:
        if server.available is None:
            yield f"server          {server.weights / GIB:.1f} GiB of weights on a GPU, {server.token} bytes for a token's keys and values"
            return
        sizes = f"{server.weights / GIB:.1f} of {server.available / GIB:.1f} GiB for weights, {server.cache / GIB:.1f} for keys and values"
        yield f"server          on each GPU {sizes}, {server.token} bytes for a token"
        lengths = (self.max_context, max(1, self.max_context // 2))
        held = " or ".join(f"{server.requests(length)} of {length} tokens" for length in lengths)
        yield f"requests        a server holds {held}; rollout.max_running={self.max_running}"


def memory_plan(config: RunConfig) -> MemoryPlan:
    """Plan of a configuration without problems. ConfigError for a model that is not there, or GPUs that are too few."""
    hf = model_config(config.model)
    ranks, server = planned(hf, config)
    gpu = config.placement.gpu
    return MemoryPlan(
        name=config.name,
        gpu=None if gpu is None else gpu.name,
        gpu_bytes=None if gpu is None else gpu.memory_bytes,
        host_bytes=None if gpu is None or gpu.host_memory_gib is None else gpu.host_memory_gib * GIB,
        ranks=ranks,
        beside=companions_memory(hf, config),
        server=server,
        max_context=config.model.max_context,
        max_running=config.rollout.max_running,
        nodes=node_memory(hf, config, ranks, server),
        checkpoint_bytes=checkpoint_bytes(hf, config),
        num_checkpoints=config.keep_checkpoints + 1,
    )


def planned(hf: Mapping[str, Any], config: RunConfig) -> tuple[list[RankMemory], ServerMemory | None]:
    """Ranks by stage, and a GPU of a server, for a layout without problems."""
    layout = config.rollout.layout
    divides = layout.gpus % layout.dp == 0 and layout.gpus % layout.ep == 0 and layout.tp > 0  # else reported by validation
    server = server_memory(hf, config) if config.rollout.traits.has_environment and divides else None
    return rank_memory(hf, config, server if num_shared(config) > 0 else None), server


def described(config: RunConfig) -> Iterator[str]:
    """Lines for `moerl check`: the worst rank, the servers, the worst node. None where the model is not there yet."""
    if facts_of(config.model).hf is None:
        return
    plan = memory_plan(config)
    worst, phase = plan.worst, plan.worst.worst
    of = "" if plan.gpu_bytes is None else f" of {plan.gpu_bytes / GIB:.1f}"
    where = f"GiB on a rank of stage {worst.stage} {DURING[phase]}, {_with_margin(plan.ranks, worst, phase)}"
    yield f"memory          {worst.most / GIB:.1f}{of} {where}: {_told(worst.phases[phase])}"
    yield from plan._beside_lines()
    if plan.server is not None:
        yield from plan._server_lines(plan.server)
    node = plan.worst_node
    yield f"host memory     {node.total / GIB:.0f} GiB on node {node.node}: {_told(node.kinds)}"


def _with_margin(ranks: Sequence[RankMemory], worst: RankMemory, phase: Phase) -> str:
    """Most of all ranks and phases with its margin, and where that is, if not on `worst` in `phase`."""
    own, most = worst.device(phase) + worst.margins[phase], max(rank.most_with_margin for rank in ranks)
    told = f"{most / GIB:.1f} with its margin"
    if own == most:
        return told
    rank = next(rank for rank in ranks if rank.most_with_margin == most)
    where = next(DURING[each] for each in rank.phases if rank.device(each) + rank.margins[each] == most)
    return f"{told} on one of stage {rank.stage} {where}"


def _some(kinds: Mapping[str, int]) -> dict[str, int]:
    return {kind: size for kind, size in kinds.items() if size}


def _told(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {size / GIB:.3g}" for kind, size in kinds.items() if size)


def _update_rows(ranks: Sequence[RankMemory]) -> list[list[str]]:
    kinds = kinds_of(ranks, ["update"])
    rows = [["stage", "parameters", *kinds, "in an update"]]
    for rank in ranks:
        sizes = [rank.phases["update"].get(kind, 0) for kind in kinds]
        rows.append([str(rank.stage), f"{rank.parameters / 1e6:.0f} M", *(f"{size / GIB:.2f}" for size in (*sizes, rank.device("update")))])
    return rows


def _phase_rows(ranks: Sequence[RankMemory]) -> list[list[str]]:
    phases = list(ranks[0].phases)
    rows = [["stage", *phases, "largest", "with margin"]]
    for rank in ranks:
        sizes = [rank.device(phase) for phase in phases]
        rows.append([str(rank.stage), *(f"{size / GIB:.2f}" for size in (*sizes, rank.most, rank.most_with_margin))])
    return rows


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table, its columns to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
