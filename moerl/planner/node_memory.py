"""Host memory of nodes, and the disk that checkpoints take."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moerl.config.derive.collectors import num_collectors
from moerl.config.derive.companion_models import companion_models
from moerl.config.derive.gpu_map import gpu_map, num_shared
from moerl.config.derive.model_configs import routes_to_replay
from moerl.config.derive.object_store import TOKEN_BYTES, most_bytes, sample_bytes
from moerl.config.schema.run_config import RunConfig
from moerl.models.families.parts.config_fields import is_tied, num_mtp_layers
from moerl.planner import fixed_memory as fixed
from moerl.planner.layer_activations import WIDTHS
from moerl.planner.parameter_counts import model_parameters, mtp_parameters
from moerl.planner.rank_memory import RankMemory, companion_memory, of_companion
from moerl.planner.server_memory import ServerMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMemory:
    """Bytes of host memory of a node."""

    node: int
    """By its place in the order of placement.topology, from 0."""
    stages: tuple[int, ...]
    """Those of its ranks; none: it has servers alone."""
    kinds: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.kinds.values())


def node_memory(hf: Mapping[str, Any], config: RunConfig, ranks: Sequence[RankMemory], server: ServerMemory | None) -> list[NodeMemory]:
    """Memory of every node that has a rank or a server. `ranks`: by stage. `server`: what each GPU of one holds; None: they use no
    GPUs. ConfigError where no GPUs are left for somebody."""
    mapped, per_stage = gpu_map(config), config.train.layout.ranks // config.train.layout.pp
    shared = {gpu for gpus in mapped.servers[: num_shared(config)] for gpu in gpus}
    stages: dict[int, list[int]] = {}
    for rank, gpu in enumerate(mapped.ranks):
        stages.setdefault(gpu.node, []).append(rank // per_stage)
    others = {model.name: companion_memory(hf, config, model) for model in companion_models(config) if model.layout is not None}
    beside: dict[int, list[Mapping[str, int]]] = {}
    for name, gpus in mapped.beside.items():
        for rank, gpu in enumerate(gpus):
            beside.setdefault(gpu.node, []).append(next(each for each in others[name] if rank in each.ranks).host)
    serving = Counter(gpu.node for gpus in mapped.servers for gpu in gpus if server is not None)
    asleep = Counter(gpu.node for gpu in shared if server is not None)
    samples, routes = most_bytes(config), routes_share(config)
    collectors = num_collectors(config)
    holders = min(collectors, config.rollout.num_servers, config.placement.nodes)
    found = []
    for node in sorted({*stages, *beside, *serving}):
        kinds: Counter[str] = Counter()
        for stage in stages.get(node, ()):
            kinds.update(ranks[stage].host)
        for host in beside.get(node, ()):
            kinds.update(host)
        if server is not None:
            kinds["process"] += serving[node] * fixed.HOST_PROCESS
            kinds["drafting layers of servers asleep"] = asleep[node] * server.unsent
            kinds["tensors on their way to servers"] = serving[node] * largest_tensors(hf, config)
        if node < holders:  # where collectors are, at most
            kinds["collectors"] = 0 if config.rollout.traits.runs_in_driver else -(-collectors // holders) * fixed.COLLECTOR_PROCESS
            kinds["object store, samples"] = round(samples * (1 - routes) / holders)
            kinds["object store, routes"] = round(samples * routes / holders)
        sizes = {name: size for name, size in kinds.items() if size}
        found.append(NodeMemory(node=node, stages=tuple(sorted(set(stages.get(node, ())))), kinds=sizes))
    return found


def routes_share(config: RunConfig) -> float:
    """Share of a sample's bytes: those of the experts that the server's routers chose (train.router_replay=rollout)."""
    routes = routes_to_replay(config)
    if routes is None:
        return 0.0
    per_token = routes.num_layers * routes.top_k * routes.dtype.itemsize
    assert sample_bytes(config) > 0
    return per_token / (per_token + TOKEN_BYTES)


def largest_tensors(hf: Mapping[str, Any], config: RunConfig) -> int:
    """Embedding, and output layer if that is another tensor: over a network they come in pieces, and are put together in host memory by
    every GPU of a server of vLLM, which wants tensors whole (moerl/weights/installation.py)."""
    if config.rollout.traits.joined != "all":
        return 0
    return (1 if is_tied(hf) else 2) * hf["vocab_size"] * hf["hidden_size"] * WIDTHS[config.rollout_dtype]


def checkpoint_bytes(hf: Mapping[str, Any], config: RunConfig) -> int:
    """A whole checkpoint on disk, of all models that learn: parameters in their dtype, master weights in float32 where that is narrower,
    two moments, or one of what Muon updates."""
    more = mtp_parameters(hf) if config.train.mtp_loss > 0 and num_mtp_layers(hf) else 0
    learning = [of_companion(hf, config, model) for model in companion_models(config) if model.trains]
    return _checkpoint_bytes(hf, config, more) + sum(_checkpoint_bytes(*model, 0) for model in learning)


def _checkpoint_bytes(hf: Mapping[str, Any], config: RunConfig, more: int) -> int:
    """`more`: parameters beside those of its layers."""
    count, wide = sum(model_parameters(hf)) + more, WIDTHS[config.train.dtype]
    moment, masters = max(wide, 4), 4 if config.train.dtype == "bfloat16" else 0
    ends = hf["vocab_size"] * hf["hidden_size"] * (1 if is_tied(hf) else 2)
    return count * (wide + masters + moment) + (count if config.train.optimizer.muon is None else ends) * moment
