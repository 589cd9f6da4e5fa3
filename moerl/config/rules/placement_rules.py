"""Rules of `placement`."""

from collections.abc import Iterator
from pathlib import Path

from moerl.config.derive.companion_models import own_layouts
from moerl.config.derive.gpu_map import gpu_map, gpus_per_server
from moerl.config.rules.algorithm_rules import custom_problems
from moerl.config.rules.facts import Facts
from moerl.config.rules.parallel_rules import broken_layout
from moerl.config.schema.run_config import RunConfig
from moerl.config.schema.strict import MOST
from moerl.types.errors import ConfigError, Problem, can_be, problem


def placement_problems(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    found = [*_mode_problems(config), *_node_problems(config), *_beyond_most(config)]
    yield from found
    if found or any(custom_problems(config.algorithm)):
        return
    if any(fault for layout in (config.train.layout, *own_layouts(config).values()) for fault in broken_layout(layout, None)):
        return
    try:
        mapped = gpu_map(config)
    except ConfigError as error:
        yield from error.problems
        return
    layout, gpus = config.rollout.layout, config.placement.gpus_per_node
    numbers = {len({gpu.node for gpu in server}) for server in mapped.servers if server}
    if not numbers <= {layout.nodes}:
        rule = f"must put the {layout.gpus} GPUs of a server on {layout.nodes} nodes"
        reason = f"rollout.layout.gpus_per_node={layout.gpus_per_node} says so; servers would be on {', '.join(map(str, sorted(numbers)))}"
        fix = f"rollout.layout.gpus_per_node={layout.gpus if gpus is None else gpus}, or servers of fewer GPUs"
        yield problem("placement.gpus_per_node", gpus, rule, reason, fix)


def _beyond_most(config: RunConfig) -> Iterator[Problem]:
    """Products of factors that are each in range. Every GPU is placed by itself, so that more would be placed for hours."""
    placement, rollout = config.placement, config.rollout
    per_node = 1 if placement.gpus_per_node is None else placement.gpus_per_node
    if placement.nodes * per_node > MOST:
        reason, fix = f"with {per_node} GPUs on each they would be {placement.nodes * per_node} GPUs", "fewer nodes"
        yield problem("placement.nodes", placement.nodes, f"must have at most {MOST} GPUs together", reason, fix)
    if rollout.num_servers * gpus_per_server(rollout) > MOST:
        reason, fix = f"with {gpus_per_server(rollout)} GPUs each they would have {rollout.num_servers * gpus_per_server(rollout)}", "fewer"
        yield problem("rollout.num_servers", rollout.num_servers, f"must have at most {MOST} GPUs together", reason, fix)


def _mode_problems(config: RunConfig) -> Iterator[Problem]:
    placement, mode = config.placement, config.placement.mode
    if mode == "colocated" and config.max_staleness > 0:
        reason = "servers sleep while the trainer has the GPUs, so that nothing is sampled ahead"
        fix = "max_staleness=0, or placement.mode=separate or group_colocated"
        yield problem("max_staleness", config.max_staleness, "must be 0 with placement.mode=colocated", reason, fix)
    if mode != "separate" and config.train.offload != "all":
        reason = "servers take the memory that the trainer leaves, and it must leave their GPUs"
        yield problem("train.offload", config.train.offload, f"must be all with placement.mode={mode}", reason, "train.offload=all")
    if mode != "group_colocated" and placement.num_shared is not None:
        reason = f"with mode={mode} it is {'all of them' if mode == 'colocated' else 'none'}"
        yield problem("placement.num_shared", placement.num_shared, "has no effect", reason, "leave it out, or mode=group_colocated")
    if mode == "group_colocated" and not 0 < (placement.num_shared if placement.num_shared is not None else 0) < config.rollout.num_servers:
        rule = f"must be at least 1 and less than rollout.num_servers={config.rollout.num_servers}"
        reason = "some servers share the trainer's GPUs and some do not; otherwise mode=colocated or separate says it"
        yield problem(
            "placement.num_shared", placement.num_shared, rule, reason, "placement.num_shared=1 with rollout.num_servers=2 or more"
        )


def _node_problems(config: RunConfig) -> Iterator[Problem]:
    placement = config.placement
    if placement.topology is not None and not (can_be(Path(placement.topology)) and Path(placement.topology).is_file()):
        reason = "the order of the nodes is read from it"
        yield problem("placement.topology", placement.topology, "is not a file", reason, "a topology.conf, or leave it out")
    if placement.nodes == 1:
        return
    if placement.gpus_per_node is None:
        reason = "what does not fit on one node goes to the next, and nothing says how much fits"
        yield problem("placement.gpus_per_node", None, "must be given for more than one node", reason, "placement.gpus_per_node=8")
    if config.rollout.host is not None:
        reason = "every server listens on the address of its own node"
        yield problem("rollout.host", config.rollout.host, "has no meaning for more than one node", reason, "leave it out")
    if config.weights.transport == "ipc":
        reason = "servers on another node than the trainer's rank 0 cannot map its memory"
        yield problem("weights.transport", "ipc", "reaches one node only", reason, "weights.transport=auto, nccl or disk")
