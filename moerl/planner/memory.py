"""Memory that training ranks and rollout servers need at least, from the settings alone: no torch, no GPU, some milliseconds.

Counted is what is certain: parameters, gradients, optimizer, the reference, inputs that layers keep for the backward pass, logits with
their gradients; of servers their weights. Not counted, and on top: activations within a layer, buffers of NCCL and of pushes, CUDA
itself, what a sleeping server keeps, keys and values. So what does not fit here cannot fit; what fits may still be too much.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moerl.config.derive.model_configs import model_config
from moerl.config.rules.facts import facts_of
from moerl.config.schema.memory_config import FullRecompute
from moerl.config.schema.run_config import RunConfig
from moerl.config.schema.train_config import TrainConfig
from moerl.models.families.family import num_mtp_layers
from moerl.models.families.family_table import FAMILIES
from moerl.planner.parameter_counts import ChunkParameters, model_parameters, rank_parameters

GIB = 2**30
_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of each rank of a pipeline stage while it updates."""

    stage: int
    parameters: int
    """Their number, without padding."""
    weights: int
    reference: int
    gradients: int
    optimizer: int
    layer_inputs: int
    """Inputs of layers, of the micro-batches that are under way at once where responses are as long as they may be."""
    logits: int
    """Logits of a full micro-batch, with their gradients, of every depth of multi-token prediction; and the float32 blocks of log-probs."""
    host: int
    """Bytes of host memory: what the optimizer keeps there (train.optimizer.memory.cpu_fraction)."""

    @property
    def device(self) -> int:
        return sum(bytes_ for _, bytes_ in self.kinds())

    def __str__(self) -> str:
        return ", ".join(f"{name} {size / GIB:.3g}" for name, size in self.kinds() if size)

    def kinds(self) -> Iterator[tuple[str, int]]:
        """Name and bytes of each kind on the GPU."""
        for name in ("weights", "reference", "gradients", "optimizer", "layer_inputs", "logits"):
            yield name.replace("_", " "), getattr(self, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerMemory:
    """Bytes of each GPU of a rollout server."""

    weights: int
    available: int | None
    """Memory for weights, keys and values: rollout.layout.memory_fraction of placement.gpu. None: nothing says how much there is."""


def rank_memory(hf: Mapping[str, Any], config: RunConfig) -> list[RankMemory]:
    """Memory of every pipeline stage, whose ranks need alike; for a layout without problems."""
    train, layout = config.train, config.train.layout
    fields = FAMILIES[hf["model_type"]].transformer_config(hf)
    wide = _BYTES[train.dtype]
    tokens = min(train.micro_batch_tokens, _update_tokens(config)) // layout.cp
    found = []
    for stage, chunks in enumerate(rank_parameters(hf, train)):
        buffer, shard, count = (sum(getattr(chunk, name) for chunk in chunks) for name in ("buffer", "shard", "count"))
        on_device, on_host = _optimizer_bytes(train)
        is_last = stage == layout.pp - 1
        depths = 1 + (num_mtp_layers(hf) if train.mtp_loss > 0 else 0)
        columns = -(-hf["vocab_size"] // layout.tp)
        found.append(
            RankMemory(
                stage=stage,
                parameters=count,
                weights=buffer * wide,
                reference=count * wide if config.uses_reference else 0,
                gradients=buffer * _gradient_bytes(train),
                optimizer=round(shard * on_device),
                layer_inputs=_kept_inputs(config, stage, chunks) * (tokens // layout.tp) * fields["hidden_size"] * wide,
                logits=(tokens * 2 * depths * wide + 2 * train.logprob_chunk_tokens * _BYTES["float32"]) * columns if is_last else 0,
                host=round(shard * on_host),
            )
        )
    return found


def _gradient_bytes(train: TrainConfig) -> int:
    return _BYTES["float64"] if train.dtype == "float64" else _BYTES[train.optimizer.memory.main_grads_dtype]


def _optimizer_bytes(train: TrainConfig) -> tuple[float, float]:
    """Bytes of each element of a rank's shard on the GPU and on the host: master weight (none if parameters are as wide) and two moments.

    The hybrid optimizer has a copy of the parameter, its gradient and the moments on the host (cpu_offloading/hybrid_optimizer.py), and
    the distributed one keeps its masters on the GPU beside it, unless it is precision-aware (distrib_optimizer.py).
    """
    memory, share = train.optimizer.memory, train.optimizer.memory.cpu_fraction
    moment = _BYTES["float64"] if train.dtype == "float64" else _BYTES["float32"]
    if memory.precision_aware:
        states = sum(_BYTES[name] for name in (memory.main_params_dtype, memory.exp_avg_dtype, memory.exp_avg_sq_dtype))
        return states * (1 - share), 16 * share
    masters = _BYTES["float32"] if train.dtype == "bfloat16" else 0
    return masters + 2 * moment * (1 - share), (2 * moment + 8) * share


def _kept_inputs(config: RunConfig, stage: int, chunks: list[ChunkParameters]) -> int:
    """Layers' inputs that the stage holds at the height of the schedule (megatron/core/pipeline_parallel/schedules.py)."""
    train, layout = config.train, config.train.layout
    per_chunk = [chunk.num_layers for chunk in chunks]
    if isinstance(train.recompute, FullRecompute) and train.recompute.method == "uniform":
        per_chunk = [layers // train.recompute.num_layers for layers in per_chunk]
    if layout.vpp == 1:
        return min(layout.pp - stage, _micro_batches(config)) * per_chunk[0]
    runs = min(2 * (layout.pp - stage - 1) + (layout.vpp - 1) * layout.pp + 1, layout.vpp * _micro_batches(config))
    return runs * min(per_chunk)


def _micro_batches(config: RunConfig) -> int:
    """Number of full ones in an update on a data-parallel rank, at least one."""
    return max(1, _update_tokens(config) // config.train.micro_batch_tokens)


def _update_tokens(config: RunConfig) -> int:
    """Tokens of an update on a data-parallel rank, where every sample has model.max_context of them."""
    samples = config.groups_per_step * config.group_size
    return samples * config.model.max_context // (config.train.updates_per_step * config.train.layout.dp)


def server_memory(hf: Mapping[str, Any], config: RunConfig) -> ServerMemory:
    """At least: every tensor cut over all GPUs that may share it, FP8 as if nothing stayed wider."""
    layout = config.rollout.layout
    others, experts = model_parameters(hf)
    wide = 1 if layout.weights == "fp8" else _BYTES[config.rollout_dtype]
    gpu = config.placement.gpu
    available = None if gpu is None else int(gpu.memory_mib * 2**20 * (layout.memory_fraction or 1))
    return ServerMemory(weights=(others // layout.tp + experts // layout.gpus) * wide, available=available)


def described(config: RunConfig) -> Iterator[str]:
    """Lines for people: the worst stage, and the servers. None where the model is not there yet."""
    if (hf := facts_of(config.model).hf) is None:
        return
    worst, gpu = max(rank_memory(hf, config), key=lambda each: each.device), config.placement.gpu
    of = "" if gpu is None else f" of {gpu.memory_mib * 2**20 / GIB:.1f}"
    yield f"memory          at least {worst.device / GIB:.3g}{of} GiB on a rank of stage {worst.stage} in an update: {worst}"
    if config.rollout.engine in ("vllm", "sglang"):
        server = server_memory(hf, config)
        of = "" if server.available is None else f" of {server.available / GIB:.1f}"
        yield f"server memory   at least {server.weights / GIB:.3g}{of} GiB on a GPU, for weights"


def table(config: RunConfig) -> str:
    """Memory of every pipeline stage, as `moerl plan` prints it."""
    hf = model_config(config.model)
    stages = rank_memory(hf, config)
    names = [name for name, _ in stages[0].kinds()]
    lines = [["stage", "parameters", *names, "together", "host"]]
    for each in stages:
        sizes = [size for _, size in each.kinds()]
        lines.append(
            [str(each.stage), f"{each.parameters / 1e6:.0f} M", *(f"{size / GIB:.2f}" for size in (*sizes, each.device, each.host))]
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join(["memory of a rank in an update, GiB at least (docs/design/memory.md)", *text])
