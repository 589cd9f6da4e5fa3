"""`moerl plan`: what a push of a run's weights moves over the network, from its layout and that of the rollout."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from moerl.config.derive.hf_config import model_config
from moerl.config.derive.model_shape import shape_of_config
from moerl.config.schema.run_config import RunConfig
from moerl.train.push.planned_tensors import push_tensors
from moerl.types.errors import ConfigError, MoerlError, Problem, problem
from moerl.weights.plan.buckets import deliveries, in_order
from moerl.weights.plan.plan_faults import faults
from moerl.weights.plan.rounds import bound_seconds, incomplete_bytes, seconds
from moerl.weights.plan.run_plan import part_bytes
from moerl.weights.plan.senders import plan_transfers
from moerl.weights.plan.tensor_specs import num_bytes
from moerl.weights.plan.transfer_plan import RolloutLayout, TransferPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    rollout: RolloutLayout
    card_gbit: float
    """Per second, of one GPU's card."""
    bucket_bytes: int


def rollout_of(config: RunConfig, *, servers: int | None, gpus_per_server: int | None, gpus_per_node: int | None) -> RolloutLayout:
    """The recipe's servers, with what is not None instead; other GPUs per server share all experts out. Raises ConfigError for EPLB."""
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


def transfer_report(config: RunConfig, network: Network) -> str:
    """Text for people. Raises ConfigError for a rollout that cannot serve the model."""
    num_experts = shape_of_config(model_config(config.model)).num_experts
    if problems := list(_problems(network.rollout, num_experts)):
        raise ConfigError(problems)
    tensors = push_tensors(config)
    counted = 0 if num_experts is None else num_experts
    size = part_bytes(network.bucket_bytes)
    plan = plan_transfers(tensors, config.train.layout, network.rollout, num_experts=counted, part_bytes=size)
    if wrong := faults(plan, counted):
        raise MoerlError("the plan is wrong, which is a fault of moerl: " + "; ".join(wrong))
    return "".join(f"{line}\n" for line in _lines(plan, network))


def _problems(rollout: RolloutLayout, num_experts: int | None) -> Iterator[Problem]:
    if num_experts is not None and num_experts % rollout.expert_shares:
        fix = "one of " + ", ".join(str(number) for number in range(1, num_experts + 1) if num_experts % number == 0)
        rule, reason = f"must divide the model's {num_experts} experts", "each GPU of a server holds whole experts"
        yield problem("--gpus-per-server", rollout.gpus_per_server, rule, reason, fix)
    larger, smaller = sorted((rollout.gpus_per_server, rollout.gpus_per_node), reverse=True)
    if larger % smaller:
        reason = "servers fill nodes, or nodes fill servers"
        rule = f"must divide --gpus-per-server={rollout.gpus_per_server}, or be a multiple of it"
        yield problem("--gpus-per-node", rollout.gpus_per_node, rule, reason, f"--gpus-per-node={rollout.gpus_per_server}")


def _lines(plan: TransferPlan, network: Network) -> Iterator[str]:
    rollout, rate = plan.rollout, network.card_gbit / 8 * 1e9
    experts = sum(tensor.num_bytes for tensor in plan.tensors if tensor.expert is not None)
    others = sum(tensor.num_bytes for tensor in plan.tensors) - experts
    gpus, width = min(rollout.gpus_per_node, rollout.num_gpus), rollout.gpus_per_server // rollout.expert_shares
    shares = min(rollout.expert_shares, max(1, gpus // width))  # of a node, each counted once
    least = (experts * shares / rollout.expert_shares + others) / gpus
    found = deliveries(plan, bucket_bytes=network.bucket_bytes, relays=True)
    buckets = in_order(found.jobs)
    incomplete = incomplete_bytes(buckets, {spec.name: num_bytes(spec) for spec in found.tensors})
    num_rounds = 1 + max(bucket.round for bucket in buckets)
    bound = bound_seconds(plan, bytes_per_second=rate)
    yield f"model            {_gb(experts)} of experts, {_gb(others)} of all else, in {len(plan.tensors)} tensors"
    yield f"trainer          {plan.layout.ranks} GPUs"
    yield f"rollout          {rollout.num_servers} servers of {rollout.gpus_per_server} GPUs on {rollout.num_nodes} nodes"
    once = f"once per node, {shares} / {rollout.expert_shares} of the experts and all else = {_gb(least)} by GPU"
    yield f"network in       {_range(plan.received())} by GPU; {once}"
    yield f"network out      {_range(plan.sent())} by trainer GPU"
    yield f"within nodes     {_range(plan.spread_in_node())} by GPU"
    yield f"bound            {bound:.2f} s at {network.card_gbit:g} Gbit/s: the busiest card alone"
    of = f"{len(buckets)} buckets of at most {network.bucket_bytes / 2**20:g} MiB"
    yield f"schedule         {num_rounds} rounds of {of}, {seconds(buckets, bytes_per_second=rate):.2f} s"
    yield f"incomplete       {_gb(incomplete)} by GPU at most: tensors that come in pieces, until they are whole"
    yield f"for comparison   {(experts + others) / rate:.2f} s if every GPU took everything over its card"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.2f} GB"


def _range(by_gpu: np.ndarray) -> str:
    return f"{_gb(by_gpu.min())} to {_gb(by_gpu.max())}"
