"""Rules across fields: what the schema cannot say. Each broken one is a `Problem` with its reason and what to write."""

from moerl.config.rules.algorithm_rules import algorithm_problems
from moerl.config.rules.companion_rules import companion_problems
from moerl.config.rules.engine_rules import (
    delta_problems,
    engine_problems,
    nccl_problems,
    replay_problems,
    server_problems,
    tls_problems,
)
from moerl.config.rules.facts import Facts, Rule
from moerl.config.rules.fp8_rules import fp8_problems
from moerl.config.rules.job_rules import kubernetes_problems, slurm_problems
from moerl.config.rules.megatron_rules import megatron_problems
from moerl.config.rules.memory_rules import memory_problems
from moerl.config.rules.model_rules import bridge_problems, length_problems, model_problems, mtp_problems
from moerl.config.rules.parallel_rules import train_layout_problems
from moerl.config.rules.placement_rules import placement_problems
from moerl.config.rules.run_rules import (
    eval_problems,
    micro_batch_problems,
    network_problems,
    observe_problems,
    optimizer_problems,
    run_problems,
    staleness_problems,
    straggler_problems,
)
from moerl.config.rules.server_layout_rules import layout_problems
from moerl.config.schema.run_config import RunConfig
from moerl.types.errors import Problem

_RULES: tuple[Rule, ...] = (
    run_problems,
    staleness_problems,
    straggler_problems,
    model_problems,
    length_problems,
    micro_batch_problems,
    train_layout_problems,
    optimizer_problems,
    memory_problems,
    algorithm_problems,
    companion_problems,
    eval_problems,
    server_problems,
    tls_problems,
    layout_problems,
    engine_problems,
    nccl_problems,
    delta_problems,
    observe_problems,
    megatron_problems,
    replay_problems,
    mtp_problems,
    bridge_problems,
    fp8_problems,
    slurm_problems,
    kubernetes_problems,
    network_problems,
    placement_problems,
)


def validate(config: RunConfig, facts: Facts) -> list[Problem]:
    """Every broken rule of a configuration that satisfies the schema; `facts` are those of its model."""
    return [found for rule in _RULES for found in rule(config, facts)]
