"""Rules across fields: what the schema cannot say. Each broken one is a `Problem` with its reason and what to write."""

from moerl.config.rules import (
    algorithm_rules,
    companion_rules,
    engine_rules,
    fp8_rules,
    job_rules,
    megatron_rules,
    memory_rules,
    model_rules,
    parallel_rules,
    placement_rules,
    run_rules,
    server_layout_rules,
)
from moerl.config.rules.facts import Facts, Rule
from moerl.config.schema.run_config import RunConfig
from moerl.types.errors import Problem

_RULES: tuple[Rule, ...] = (
    run_rules.run_problems,
    run_rules.staleness_problems,
    run_rules.straggler_problems,
    model_rules.model_problems,
    model_rules.length_problems,
    run_rules.micro_batch_problems,
    parallel_rules.train_layout_problems,
    run_rules.optimizer_problems,
    memory_rules.memory_problems,
    algorithm_rules.algorithm_problems,
    companion_rules.companion_problems,
    run_rules.eval_problems,
    engine_rules.server_problems,
    engine_rules.tls_problems,
    server_layout_rules.layout_problems,
    engine_rules.engine_problems,
    engine_rules.nccl_problems,
    engine_rules.delta_problems,
    run_rules.observe_problems,
    megatron_rules.megatron_problems,
    engine_rules.replay_problems,
    model_rules.mtp_problems,
    model_rules.bridge_problems,
    fp8_rules.fp8_problems,
    job_rules.slurm_problems,
    job_rules.kubernetes_problems,
    run_rules.network_problems,
    placement_rules.placement_problems,
)


def validate(config: RunConfig, facts: Facts) -> list[Problem]:
    """Every broken rule of a configuration that satisfies the schema; `facts` are those of its model."""
    return [found for rule in _RULES for found in rule(config, facts)]
