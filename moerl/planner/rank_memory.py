"""Memory of training ranks by pipeline stage, phase and kind, from the settings alone: no torch, no GPU, some milliseconds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from moerl.config.derive.companion_models import CompanionModel, companion_config, companion_models, makes_room
from moerl.config.derive.gpu_map import relays_pushes
from moerl.config.derive.model_shape import read_config
from moerl.config.schema.run_config import RunConfig
from moerl.config.schema.train_config import TrainConfig
from moerl.models.families.parts.config_fields import is_tied, num_mtp_layers
from moerl.planner import fixed_memory as fixed
from moerl.planner.layer_activations import FP8_WEIGHT_BYTES, WIDTHS
from moerl.planner.parameter_counts import ChunkParameters, rank_parameters
from moerl.planner.server_memory import ServerMemory
from moerl.planner.stage_activations import StageActivations, StageModel
from moerl.train.memory.memory_states import KINDS, MUON_ROUND_ELEMENTS, ON_DEVICE, Offload, State

Phase = Literal["load", "rollout", "log-probs", "companions", "update", "save", "push"]
"""load: when the run starts. rollout: servers answer, the trainer sleeps. companions: models beside the policy, on its ranks, are asked and
learn. push: weights go from the trainer to the servers."""
PHASES: tuple[Phase, ...] = get_args(Phase)
_STATES: Mapping[Phase, State] = {
    "load": "training", "rollout": "asleep", "log-probs": "scoring", "companions": "scoring", "update": "training",
    "save": "training", "push": "scoring",
}  # fmt: skip
"""In which the trainer's memory is (moerl/residency.py)."""

DURING: Mapping[Phase, str] = {
    "load": "at the start", "rollout": "while servers answer", "log-probs": "in a log-prob pass",
    "companions": "while a model beside the policy learns", "update": "in an update",
    "save": "while it is saved", "push": "in a push",
}  # fmt: skip

_WITHOUT_FP8_COPIES: Mapping[Offload, tuple[Phase, ...]] = {"none": (), "optimizer": ("push",), "all": ("push", "rollout")}
"""Phases into which something has left the GPU, and these copies with it (moerl/train/memory/offload.py); a canary that is scored
makes them again."""

IMBALANCE = 1.5
"""Tokens of the busiest rank's experts over the mean that margins allow for."""
FRAGMENTATION = 0.1
"""Share of the activations that margins leave for gaps between allocations."""

_KINDS = (
    "weights", "reference", "gradients", "optimizer", "companions", "FP8 copies", "activations", "layer at work", "logits",
    "Muon", "push buffers", "NCCL", "CUDA", "server",
)  # fmt: skip

Kinds = Mapping[str, int]
"""Bytes by kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of each rank of a pipeline stage."""

    stage: int
    ranks: range
    """Numbers of these ranks, as Megatron counts them."""
    parameters: int
    """Number of a rank's, without padding."""
    phases: Mapping[Phase, Kinds]
    """On the GPU, with what a server on the same GPU holds; companions only where there are some."""
    margins: Mapping[Phase, int]
    """Bytes that may be needed on top: busier experts, fragmentation, what sleeping servers were reported to keep."""
    host: Kinds
    """Host memory of the rank's process."""

    @property
    def worst(self) -> Phase:
        return max(self.phases, key=self.device)

    @property
    def most(self) -> int:
        return self.device(self.worst)

    @property
    def most_with_margin(self) -> int:
        return max(self.device(phase) + self.margins[phase] for phase in self.phases)

    def device(self, phase: Phase) -> int:
        return sum(self.phases.get(phase, {}).values())


class _Static:
    """Memory that a stage's ranks hold whatever they do."""

    def __init__(
        self, hf: Mapping[str, Any], config: RunConfig, chunks: list[ChunkParameters], *, uses_reference: bool, trains: bool = True,
        is_copied: bool = False,
    ):  # fmt: skip
        """`is_copied`: checkpoints are copies on the host, however they are written."""
        train, wide = config.train, WIDTHS[config.train.dtype]
        buffer, shard, self.parameters = (sum(getattr(chunk, name) for chunk in chunks) for name in ("buffer", "shard", "count"))
        memory, moment = train.optimizer.memory, WIDTHS["float64" if train.dtype == "float64" else "float32"]
        # Muon has no second moment of them.
        matrices = 0 if train.optimizer.muon is None else shard - sum(chunk.shard_by_adam for chunk in chunks)
        self.kinds: dict[str, int] = {
            "parameters": (buffer + sum(sum(chunk.frozen) for chunk in chunks)) * wide,
            "gradients": buffer * gradient_bytes(train) if trains else 0,
            "optimizer": round(shard * optimizer_bytes(train) - matrices * moment) if trains else 0,
            "reference": self.parameters * wide if uses_reference else 0,
        }
        """By the names of moerl/train/memory/memory_states.py."""
        self.built = 0 if trains else buffer * gradient_bytes(train)
        """Bytes of gradients of a model that does not train, until it is built (moerl/train/megatron_engine.py)."""
        self.muon = muon_bytes(max(chunk.largest_matrix for chunk in chunks), shard, train.dtype) if matrices else 0
        """While matrices are made orthogonal."""
        share, masters = memory.cpu_fraction, train.dtype == "bfloat16"
        pinned = {width: sum(chunk.pinned_shard(width) for chunk in chunks) for width in {wide, moment, 4}}
        # Moments in float32, gradients page-locked; so are parameters if the masters are on the GPU, and else in float32 of their own
        # (megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py).
        self.on_host = round(share * (shard * 2 * moment + pinned[4] + (shard * 4 if memory.precision_aware else pinned[4])))
        # Page-locked copies but of what is on the host anyway (moerl/train/checkpoint/shard_writer.py).
        locked = 1 - share
        copies = pinned[wide] + 2 * moment * shard * share + (2 - matrices / shard) * pinned[moment] * locked
        copies += masters * (pinned[4] * locked + 4 * shard * share if memory.precision_aware else pinned[4])
        self.staged = round(copies) if (config.checkpoint.async_save or is_copied) and trains else 0
        narrow = [name for name in (memory.main_params_dtype, memory.exp_avg_dtype, memory.exp_avg_sq_dtype) if name != "float32"]
        self.widened = shard * 4 * len(narrow) if memory.precision_aware else 0
        """States that are narrower are saved in float32, all of a rank at once (moerl/train/checkpoint/sharded_state.py)."""
        self.fp8 = _fp8_copies(hf, config, chunks)


def _fp8_copies(hf: Mapping[str, Any], config: RunConfig, chunks: list[ChunkParameters]) -> int:
    """Bytes of a layer's linear modules, row- and columnwise; with the small share of norms and routers, which have none."""
    fp8, number = config.train.fp8, hf["num_hidden_layers"]
    if fp8 is None or config.train.megatron.get("disable_parameter_transpose_cache"):
        return 0
    first, last = fp8.first_layers_bf16, number - fp8.last_layers_bf16  # layers of multi-token prediction have numbers from `number` on
    elements = sum(size for chunk in chunks for layer, size in chunk.layers.items() if first <= layer < last or layer >= number)
    # Blackwell's units read FP8 operands in either order, so that tensors with one scale need no transposed copy.
    is_blackwell = config.placement.gpu is not None and config.placement.gpu.capability >= 10
    directions = 1 if fp8.recipe in ("tensorwise", "delayed") and is_blackwell else 2
    return round(elements * directions * FP8_WEIGHT_BYTES[fp8.recipe])


def rank_memory(hf: Mapping[str, Any], config: RunConfig, server: ServerMemory | None = None) -> list[RankMemory]:
    """Memory of every pipeline stage, whose ranks need alike; for a layout without problems. `server`: on the trainer's GPUs."""
    guests = [_guests(hf, config, model) for model in companion_models(config) if model.layout is None]
    wanted = [phase for phase in PHASES if guests or phase != "companions"]

    def of_stage(stage: int, chunks: list[ChunkParameters], activations: StageActivations) -> tuple[_Static, dict[Phase, Kinds], Kinds]:
        static = _Static(hf, config, chunks, uses_reference=config.uses_reference, is_copied=makes_room(config))
        beside = [guest[stage] for guest in guests]
        phases = {phase: _phase(phase, hf, config, static, activations, server, beside) for phase in wanted}
        return static, phases, _host(config, static, beside)

    return _stages(hf, config, server, of_stage)


def companions_memory(hf: Mapping[str, Any], config: RunConfig) -> dict[str, RankMemory]:
    """The worst rank of each model beside the policy that has ranks of its own. `hf`: the policy's."""
    own = [model for model in companion_models(config) if model.layout is not None]
    return {model.name: worst_rank(companion_memory(hf, config, model)) for model in own}


def companion_memory(hf: Mapping[str, Any], config: RunConfig, model: CompanionModel) -> list[RankMemory]:
    """Memory of ranks that a model beside the policy has for itself. `hf`: the policy's."""
    assert model.layout is not None
    own_hf, own = of_companion(hf, config, model)
    wanted: tuple[Phase, ...] = ("load", "log-probs", *(("update", "save") if model.trains else ()))

    def of_stage(_: int, chunks: list[ChunkParameters], activations: StageActivations) -> tuple[_Static, dict[Phase, Kinds], Kinds]:
        static = _Static(own_hf, own, chunks, uses_reference=model.uses_reference, trains=model.trains)
        phases = {phase: _phase(phase, own_hf, own, static, activations, None, ()) for phase in wanted}
        phases["load"] = {**phases["load"], "gradients": phases["load"].get("gradients", 0) + static.built}
        return static, phases, _host(own, static, ())

    return _stages(own_hf, own, None, of_stage)


def _stages(
    hf: Mapping[str, Any], config: RunConfig, server: ServerMemory | None,
    of_stage: Callable[[int, list[ChunkParameters], StageActivations], tuple[_Static, dict[Phase, Kinds], Kinds]],
) -> list[RankMemory]:  # fmt: skip
    """Ranks of every stage, from what `of_stage` says of one: what it holds always, by phase, and in host memory."""
    activations, busier = StageModel(hf, config).stages(), StageModel(hf, config, imbalance=IMBALANCE).stages()
    found, per_stage = [], config.train.layout.ranks // config.train.layout.pp
    for stage, chunks in enumerate(rank_parameters(hf, config.train)):
        static, phases, host = of_stage(stage, chunks, activations[stage])
        found.append(
            RankMemory(
                stage=stage,
                ranks=range(stage * per_stage, (stage + 1) * per_stage),
                parameters=static.parameters,
                phases=phases,
                margins={phase: _margin(phase, phases[phase], activations[stage], busier[stage], server) for phase in phases},
                host=host,
            )
        )
    return found


def of_companion(hf: Mapping[str, Any], config: RunConfig, model: CompanionModel) -> tuple[Mapping[str, Any], RunConfig]:
    return hf if model.path is None else read_config(Path(model.path)), companion_config(config, model)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Guest:
    """Bytes of a model beside the policy on each of the policy's ranks of a stage. A critic is counted with the output layer that it has
    not."""

    asleep: int
    awake: int
    """In its update; of one that does not train in a pass of log-probs, or while it is built, with buffers of gradients that then leave."""
    host: Kinds


def _guests(hf: Mapping[str, Any], config: RunConfig, model: CompanionModel) -> list[_Guest]:
    """By stage."""
    own_hf, own = of_companion(hf, config, model)
    held = ON_DEVICE[own.train.offload]["asleep"]
    found = []
    for chunks, work in zip(rank_parameters(own_hf, own.train), StageModel(own_hf, own).stages(), strict=True):
        static = _Static(own_hf, own, chunks, uses_reference=model.uses_reference, trains=model.trains)
        scoring = max(work.scoring, 0 if model.is_critic else work.scoring_logits)
        update = work.kept + (work.working if model.is_critic else work.update)
        update = max(update, static.muon)
        at_work = max(scoring, update) if model.trains else max(scoring, static.built)
        found.append(
            _Guest(
                asleep=sum(static.kinds[kind] for kind in KINDS if kind in held),
                awake=sum(static.kinds.values()) + static.fp8 + at_work,
                host={kind: size for kind, size in _host(own, static, ()).items() if kind != "process"},
            )
        )
    return found


def _phase(
    phase: Phase, hf: Mapping[str, Any], config: RunConfig, static: _Static, activations: StageActivations, server: ServerMemory | None,
    guests: Sequence[_Guest],
) -> Kinds:  # fmt: skip
    train, state = config.train, _STATES[phase]
    held = ON_DEVICE[train.offload][state]
    kinds = {"weights" if kind == "parameters" else kind: static.kinds[kind] for kind in KINDS if kind in held}
    if phase == "save":
        kinds["optimizer"] += static.widened
    if guests:
        resting = sum(guest.asleep for guest in guests)
        # They wake one at a time, when the policy has left what only training needs.
        kinds["companions"] = resting + (max(guest.awake - guest.asleep for guest in guests) if phase == "companions" else 0)
    if phase not in ("load", *_WITHOUT_FP8_COPIES[train.offload]):
        kinds["FP8 copies"] = static.fp8
    if phase == "push":
        slots = fixed.PUSH_BUFFERS + (fixed.RELAY_BUFFERS if relays_pushes(config) else 0)
        kinds["push buffers"] = slots * config.weights.bucket_bytes
    if phase == "update":
        kinds |= {
            "activations": activations.kept,
            "layer at work": activations.working,
            "logits": max(0, activations.logits - activations.working),
            "Muon": max(0, static.muon - activations.kept - max(activations.logits, activations.working)),
        }
    elif phase == "log-probs":
        kinds |= {"layer at work": activations.scoring, "logits": max(0, activations.scoring_logits - activations.scoring)}
    kinds |= {"NCCL": _communicators(hf, config, phase), "CUDA": fixed.CUDA_CONTEXT}
    if server is not None:
        awake = {"rollout": server.serving, "push": server.weights + fixed.ENGINE_ASLEEP + server.received}
        kinds["server"] = awake.get(phase, fixed.ENGINE_ASLEEP)
    return {kind: kinds[kind] for kind in _KINDS if kind in kinds}


def _communicators(hf: Mapping[str, Any], config: RunConfig, phase: Phase) -> int:
    """None at the start: NCCL makes its buffers when a group is used first."""
    layout = config.train.layout
    if phase == "load":
        return 0
    # Of trainer and servers, for pushes; of the trainer's ranks alone where they relay.
    transport, spread = config.weights.transport, config.placement.nodes > 1
    joined = config.placement.mode == "separate" and (transport == "nccl" or (transport == "auto" and spread))
    pushes_by_nccl = joined or relays_pushes(config)
    of_pushes = fixed.COMMUNICATOR[True] if pushes_by_nccl else 0
    if phase == "rollout" and config.train.destroy_groups:
        return fixed.default_group_bytes(layout) + of_pushes
    has_shared = is_tied(hf) or (config.train.mtp_loss > 0 and num_mtp_layers(hf) > 0)
    per_node = config.placement.gpus_per_node or layout.ranks
    has_muon = config.train.optimizer.muon is not None
    return fixed.communicator_bytes(layout, per_node, has_shared_embedding=has_shared, has_muon=has_muon) + of_pushes


def _margin(phase: Phase, kinds: Kinds, activations: StageActivations, busier: StageActivations, server: ServerMemory | None) -> int:
    more = 0
    if phase == "update":
        more = busier.kept + busier.update - activations.kept - activations.update
    elif phase == "log-probs":
        more = max(busier.scoring, busier.scoring_logits) - max(activations.scoring, activations.scoring_logits)
    moving = sum(kinds.get(kind, 0) for kind in ("activations", "layer at work", "logits"))
    if server is not None:
        more += server.margin if phase == "rollout" else fixed.ENGINE_ASLEEP_REPORTED - fixed.ENGINE_ASLEEP
    return more + round(FRAGMENTATION * moving)


def _host(config: RunConfig, static: _Static, guests: Sequence[_Guest]) -> Kinds:
    train = config.train
    copies = {"none": (), "optimizer": ("optimizer",), "all": ("optimizer", "parameters", "reference")}[train.offload]
    kinds = {
        "copies of what leaves the GPU": sum(static.kinds[kind] for kind in copies),
        "optimizer on the CPU": static.on_host,
        "checkpoint staging": static.staged,
        "process": fixed.HOST_PROCESS,
    }
    return {kind: size + sum(guest.host.get(kind, 0) for guest in guests) for kind, size in kinds.items()}


def gradient_bytes(train: TrainConfig) -> int:
    return WIDTHS["float64"] if train.dtype == "float64" else WIDTHS[train.optimizer.memory.main_grads_dtype]


def muon_bytes(largest: int, shard: int, dtype: str) -> int:
    """Bytes beside the optimizer's states while a rank makes its matrices of a round orthogonal (moerl/train/optimizer/muon.py): steps
    sent, received and stacked, gathered over tensor parallelism and normed, in float32; the products in the weights' dtype."""
    return min(max(largest, MUON_ROUND_ELEMENTS), max(shard, largest)) * {"bfloat16": 24, "float32": 28, "float64": 56}[dtype]


def optimizer_bytes(train: TrainConfig) -> float:
    """Bytes of each element of a rank's shard on the GPU: master weight (none if parameters are as wide) and two moments.

    Where the hybrid optimizer has moments on the host, the distributed one keeps its masters on the GPU, unless it is precision-aware
    (megatron/core/optimizer/distrib_optimizer.py).
    """
    memory, share = train.optimizer.memory, train.optimizer.memory.cpu_fraction
    moment = WIDTHS["float64"] if train.dtype == "float64" else WIDTHS["float32"]
    if memory.precision_aware:
        states = sum(WIDTHS[name] for name in (memory.main_params_dtype, memory.exp_avg_dtype, memory.exp_avg_sq_dtype))
        return states * (1 - share)
    masters = WIDTHS["float32"] if train.dtype == "bfloat16" else 0
    return masters + 2 * moment * (1 - share)


def worst_rank(ranks: list[RankMemory]) -> RankMemory:
    return max(ranks, key=lambda each: each.most)


def kinds_of(ranks: Sequence[RankMemory], phases: Sequence[Phase] = PHASES) -> list[str]:
    """Kinds that any of them has in one of `phases`, in the order of `_KINDS`."""
    return [kind for kind in _KINDS if any(rank.phases.get(phase, {}).get(kind) for rank in ranks for phase in phases)]
