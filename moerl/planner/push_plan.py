"""`moerl plan`: what a push of a run's weights moves over the network, from its layout and that of the rollout."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral, Real

import numpy as np

from moerl.config.derive.gpu_map import gpu_map, relays_pushes
from moerl.config.derive.model_configs import model_config
from moerl.config.derive.model_shape import shape_of_config
from moerl.config.rules.parallel_rules import divisors
from moerl.config.schema.run_config import RunConfig
from moerl.models.fp8_names import SCALE_SUFFIX
from moerl.types.errors import ConfigError, MoerlError, Problem, problem
from moerl.types.push import TensorSpec
from moerl.weights.plan.buckets import deliveries, in_order
from moerl.weights.plan.fp8_pairs import FP8_DTYPE
from moerl.weights.plan.plan_faults import faults
from moerl.weights.plan.run_plan import numbered, part_bytes, relays_of, without_collections
from moerl.weights.plan.schedule import bound_seconds, incomplete_bytes, seconds
from moerl.weights.plan.senders import plan_transfers
from moerl.weights.plan.tensor_specs import num_bytes
from moerl.weights.plan.transfer_plan import Rails, Relays, RolloutLayout, TransferPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The way of a push's bytes from the trainer's ranks to servers."""

    words: str
    is_card_s: bool
    """They leave a GPU by its network card, at the card's rate."""
    is_network: bool = True
    """They go over a network at all, if only by TCP."""


def route_of(config: RunConfig) -> Route:
    """As a run takes it (weights/sync.py, train/push/push_source.py): `auto` is ipc on one node and nccl over several, which is relay where
    servers share the trainer's GPUs."""
    placement, chosen = config.placement, config.weights.transport
    transport = chosen if chosen != "auto" else "ipc" if placement.nodes == 1 else "nccl"
    if transport == "disk":
        return Route(words="disk: files that ranks write and servers read, at the file system's rate", is_card_s=False, is_network=False)
    if transport == "ipc":
        words = "ipc, on one node: memory that servers map (CUDA IPC on GPUs); nothing crosses a card"
        return Route(words=words, is_card_s=False, is_network=False)
    relays = relays_pushes(config)
    if placement.device == "cpu":
        name = "relay" if relays else "nccl"
        return Route(words=f"{name} over gloo: TCP from host memory, without GPUs", is_card_s=False)
    if relays:
        way = "NCCL among the trainer's ranks over their cards, to the rank on the reader's GPU, and CUDA IPC there"
        return Route(words=f"relay: {way} (not run yet); without GPUs gloo", is_card_s=True)
    if placement.mode != "separate":
        why = "servers share the trainer's GPUs, and NCCL joins no two processes of one GPU; nodes with servers alone have no rank to relay"
        return Route(words=f"nccl over gloo: TCP through host memory, neither RDMA nor NVLink: {why}", is_card_s=False)
    return Route(words="nccl, from GPU to GPU over their cards (not run yet); without GPUs gloo", is_card_s=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PushPlan:
    """A push of all weights. Printed, it is text for people. Pairs are of the GPU with the least and the one with the most bytes."""

    expert_bytes: int
    other_bytes: int
    num_tensors: int
    trainer_gpus: int
    rollout: RolloutLayout
    route: Route
    card_gbit: float
    """Per second, of one GPU's card, or of whatever else `bound_seconds` and `schedule_seconds` are asked for."""
    is_rate_given: bool
    """By who asks; else it is the card's, which the bytes may not cross (`route`)."""
    bucket_bytes: int
    """At most, of a bucket."""
    received: tuple[float, float]
    """Over the network, by a GPU of the rollout."""
    sent: tuple[float, float]
    """Over the network, by a GPU of the trainer."""
    spread_in_node: tuple[float, float]
    """Between GPUs of a node."""
    taken: tuple[float, float]
    """By a GPU of the rollout, whatever the way."""
    bound_seconds: float
    """Seconds of the busiest card alone: no schedule is faster."""
    num_buckets: int
    num_rounds: int
    schedule_seconds: float
    relays: bool
    """Ranks relay to their node: bytes that one of them holds cross no network."""
    on_rails: float | None
    """Share of the bytes over the network that go between cards of one rail. None: no card is crossed, and no rate given."""
    incomplete_bytes: float
    """By GPU at most: tensors that come in pieces and are loaded whole, until they are."""

    @property
    def seconds_without_plan(self) -> float:
        """If every GPU took everything over its card."""
        return (self.expert_bytes + self.other_bytes) / (self.card_gbit / 8 * 1e9)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        rollout = self.rollout
        yield f"model            {_gb(self.expert_bytes)} of experts, {_gb(self.other_bytes)} of all else, in {self.num_tensors} tensors"
        yield f"trainer          {self.trainer_gpus} GPUs"
        yield f"rollout          {rollout.num_servers} servers of {rollout.gpus_per_server} GPUs on {rollout.num_nodes} nodes"
        yield from self._volumes()
        yield f"transport        {self.route.words}"
        is_told = self.is_rate_given or self.route.is_card_s
        of = f"{self.num_buckets} buckets of at most {self.bucket_bytes / 2**20:g} MiB"
        if is_told:
            yield f"bound            {self.bound_seconds:.2f} s at {self.card_gbit:g} Gbit/s: the busiest card alone"
        else:
            yield "bound            not told: the rate of this transport is not a card's; --card-gbit=N computes it, for N Gbit/s by GPU"
        yield f"schedule         {self.num_rounds} rounds of {of}" + (f", {self.schedule_seconds:.2f} s" if is_told else "")
        if self.on_rails is not None:
            yield f"rails            {self.on_rails:.1%} of the bytes stay between cards of one number"
        what = "tensors that come in pieces and are loaded whole, until they are"
        yield f"incomplete       {_gb(self.incomplete_bytes)} by GPU at most: {what}"
        if is_told:
            yield f"for comparison   {self.seconds_without_plan:.2f} s if every GPU took everything over its card"

    def _volumes(self) -> Iterator[str]:
        """Bytes by GPU: over the network, and inside a node; without one, or a rate for one, what is packed and what is taken."""
        if not (self.route.is_network or self.is_rate_given):
            yield f"packed           {_range(self.sent)} by trainer GPU"
            yield f"taken            {_range(self.taken)} by GPU"
            return
        rollout = self.rollout
        gpus, width = min(rollout.gpus_per_node, rollout.num_gpus), rollout.gpus_per_server // rollout.expert_shares
        shares = min(rollout.expert_shares, max(1, gpus // width))  # of a node, each counted once
        least = (self.expert_bytes * shares / rollout.expert_shares + self.other_bytes) / gpus
        least_of_gpu = f"{_gb(least)} by GPU" + (" less what its ranks hold" if self.relays else "")
        once = f"once per node, {shares} / {rollout.expert_shares} of the experts and all else = {least_of_gpu}"
        yield f"network in       {_range(self.received)} by GPU; {once}"
        yield f"network out      {_range(self.sent)} by trainer GPU"
        yield f"within nodes     {_range(self.spread_in_node)} by GPU"


@without_collections()
def plan_push(
    config: RunConfig, *, servers: int | None, gpus_per_server: int | None, gpus_per_node: int | None, card_gbit: float | None,
    bucket_bytes: int | None,
) -> PushPlan:  # fmt: skip
    """Plan of the recipe's servers and buckets, with what is not None instead; other GPUs per server share all experts out. Raises
    ConfigError for a rollout that cannot serve the model, or cannot be planned, and for a number that is none of those."""
    counts = {"servers": servers, "gpus_per_server": gpus_per_server, "gpus_per_node": gpus_per_node, "bucket_bytes": bucket_bytes}
    if problems := list(_number_problems(counts, card_gbit)):
        raise ConfigError(problems)
    # Here, as it loads torch: that too takes a fifth longer while Python searches for cycles.
    from moerl.train.push.planned_tensors import push_tensors

    num_experts = shape_of_config(model_config(config.model)).num_experts
    rollout = rollout_of(config, servers=servers, gpus_per_server=gpus_per_server, gpus_per_node=gpus_per_node)
    if problems := list(_problems(rollout, num_experts)):
        raise ConfigError(problems)
    largest = config.weights.bucket_bytes if bucket_bytes is None else bucket_bytes
    tensors = push_tensors(config)
    counted = 0 if num_experts is None else num_experts
    relays = _relays(config) if rollout == rollout_of(config) else None  # a run's ranks and servers are placed together
    if relays is not None:
        rollout = replace(rollout, node_of=_nodes_of_servers(config))
    route = route_of(config)
    rails = planned_rails(config, rollout) if config.placement.nodes > 1 and (route.is_card_s or card_gbit is not None) else None
    plan = plan_transfers(
        tensors, config.train.layout, rollout, num_experts=counted, part_bytes=part_bytes(largest), relays=relays, rails=rails
    )
    on_rails = None if rails is None else plan.share_on_rails(rails)
    if wrong := faults(plan, counted):
        raise MoerlError("the plan is wrong, which is a fault of moerl: " + "; ".join(wrong))
    rate = card_rate(config) if card_gbit is None else card_gbit
    joined = partial(_is_joined, config)
    return _measured(plan, route, joined, card_gbit=rate, is_rate_given=card_gbit is not None, bucket_bytes=largest, on_rails=on_rails)


def planned_rails(config: RunConfig, rollout: RolloutLayout) -> Rails:
    """Rails on nodes that are all alike, whose GPUs share the cards in order: as many cards as placement.gpu has, or one for each GPU."""
    placement = config.placement
    gpus = placement.gpus_per_node if placement.gpus_per_node is not None else rollout.gpus_per_node
    cards = gpus if placement.gpu is None or placement.gpu.cards_per_node is None else min(gpus, placement.gpu.cards_per_node)
    ranks, readers = [gpu.index for gpu in gpu_map(config).ranks], [gpu % rollout.gpus_per_node for gpu in range(rollout.num_gpus)]
    return Rails(senders=tuple(gpu * cards // gpus for gpu in ranks), readers=tuple(gpu * cards // gpus for gpu in readers))


def card_rate(config: RunConfig) -> float:
    """Rate of the network card of one GPU, in 1e9 bits per second: its share of the node's cards, or what cards of the time have."""
    gpu, gpus = config.placement.gpu, config.placement.gpus_per_node
    if gpu is None or gpu.card_gbit is None:
        return 400.0
    return gpu.card_gbit * (1 if gpu.cards_per_node is None or gpus is None else min(1.0, gpu.cards_per_node / gpus))


def _is_joined(config: RunConfig, spec: TensorSpec) -> bool:
    """Whether servers of the run put a tensor that comes in pieces together before they load it."""
    is_pair = spec.dtype == FP8_DTYPE or spec.name.endswith(SCALE_SUFFIX)
    joined = config.rollout.traits.joined
    return joined == "all" or (joined == "fp8" and is_pair)


def _measured(
    plan: TransferPlan,
    route: Route,
    is_joined: Callable[[TensorSpec], bool],
    *,
    card_gbit: float,
    is_rate_given: bool,
    bucket_bytes: int,
    on_rails: float | None,
) -> PushPlan:
    rate = card_gbit / 8 * 1e9
    found = deliveries(plan, bucket_bytes=bucket_bytes, by_node=True)
    buckets = in_order(found.jobs)
    experts = sum(tensor.num_bytes for tensor in plan.tensors if tensor.expert is not None)
    return PushPlan(
        expert_bytes=experts,
        other_bytes=sum(tensor.num_bytes for tensor in plan.tensors) - experts,
        num_tensors=len(plan.tensors),
        trainer_gpus=plan.layout.ranks,
        rollout=plan.rollout,
        route=route,
        card_gbit=card_gbit,
        is_rate_given=is_rate_given,
        bucket_bytes=bucket_bytes,
        received=_least_and_most(plan.received()),
        sent=_least_and_most(plan.sent()),
        spread_in_node=_least_and_most(plan.spread_in_node()),
        taken=_least_and_most(plan.received() + plan.spread_in_node()),
        bound_seconds=bound_seconds(plan, bytes_per_second=rate),
        num_buckets=len(buckets),
        num_rounds=1 + max(bucket.round for bucket in buckets),
        schedule_seconds=seconds(buckets, bytes_per_second=rate),
        relays=plan.relays is not None,
        on_rails=on_rails,
        incomplete_bytes=incomplete_bytes(buckets, {spec.name: num_bytes(spec) if is_joined(spec) else 0 for spec in found.tensors}),
    )


def _relays(config: RunConfig) -> Relays | None:
    """As a run has them; None: it takes another transport."""
    if not relays_pushes(config):
        return None
    mapped = gpu_map(config)
    ranks = [(gpu.node, gpu.index) for gpu in mapped.ranks]
    return relays_of(ranks, [(gpu.node, gpu.index) for server in mapped.servers for gpu in server])


def _nodes_of_servers(config: RunConfig) -> tuple[int, ...]:
    found = [gpu.node for server in gpu_map(config).servers for gpu in server]
    return tuple(map(numbered(found).__getitem__, found))


def rollout_of(
    config: RunConfig, *, servers: int | None = None, gpus_per_server: int | None = None, gpus_per_node: int | None = None
) -> RolloutLayout:
    layout = config.rollout.layout
    if layout.redundant_experts is not None:
        rule, reason = "cannot be planned", "EPLB decides while it runs which GPUs hold copies"
        fix = "rollout.layout.redundant_experts=null to plan without them"
        raise ConfigError([problem("rollout.layout.redundant_experts", layout.redundant_experts, rule, reason, fix)])
    return RolloutLayout(
        num_servers=config.rollout.num_servers if servers is None else servers,
        gpus_per_server=layout.gpus if gpus_per_server is None else gpus_per_server,
        gpus_per_node=layout.gpus_per_node if gpus_per_node is None else gpus_per_node,
        expert_parallel=layout.ep if gpus_per_server is None else None,
    )


def _number_problems(counts: Mapping[str, object], card_gbit: object) -> Iterator[Problem]:
    """Problems of what is given instead of the configuration's: a Python program may hand in anything, numpy's numbers too."""
    for name, value in counts.items():
        if value is not None and (not isinstance(value, Integral) or int(value) < 1):
            yield problem(name, value, "must be an integer > 0", "it stands instead of the configuration's", f"{name}=1, or more")
    if card_gbit is not None and not (isinstance(card_gbit, Real) and 0 < float(card_gbit) < math.inf):
        reason = "it is the rate of a GPU's network card, in 1e9 bits per second"
        yield problem("card_gbit", card_gbit, "must be a finite number > 0", reason, "card_gbit=400")


def _problems(rollout: RolloutLayout, num_experts: int | None) -> Iterator[Problem]:
    if num_experts is not None and num_experts % rollout.expert_shares:
        rule, reason = f"must divide the model's {num_experts} experts", "each GPU of a server holds whole experts"
        yield problem("--gpus-per-server", rollout.gpus_per_server, rule, reason, divisors(num_experts))
    larger, smaller = sorted((rollout.gpus_per_server, rollout.gpus_per_node), reverse=True)
    if larger % smaller:
        reason = "servers fill nodes, or nodes fill servers"
        rule = f"must divide --gpus-per-server={rollout.gpus_per_server}, or be a multiple of it"
        yield problem("--gpus-per-node", rollout.gpus_per_node, rule, reason, f"--gpus-per-node={rollout.gpus_per_server}")


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.2f} GB"


def _least_and_most(by_gpu: np.ndarray) -> tuple[float, float]:
    return float(by_gpu.min()), float(by_gpu.max())


def _range(pair: tuple[float, float]) -> str:
    return f"{_gb(pair[0])} to {_gb(pair[1])}"
