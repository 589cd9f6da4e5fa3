"""Rules of the models beside the policy: whether they are needed, what they start from, where they are."""

import re
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

from moerl.config.derive.companion_models import CompanionModel, companion_config, companion_models
from moerl.config.derive.tokenizer_files import tokenizer_difference
from moerl.config.rules.algorithm_rules import custom_problems
from moerl.config.rules.facts import Facts, facts_of
from moerl.config.rules.parallel_rules import train_layout_problems
from moerl.config.schema.companion_config import CriticConfig, DistillationConfig, OutcomeModelConfig
from moerl.config.schema.model_config import ModelConfig
from moerl.config.schema.run_config import RunConfig
from moerl.types.errors import Problem, problem


def companion_problems(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    if any(custom_problems(config.algorithm)):
        return
    yield from _effect_problems(config)
    if config.distillation is not None:
        yield from _teacher_problems(config.distillation)
    for model in companion_models(config):
        yield from _model_problems(config, facts, model)
        if model.layout is None and config.train.destroy_groups:
            reason = f"the groups of the policy's ranks are {model.section}'s too, which would lose them"
            yield problem("train.destroy_groups", True, f"must be false with {model.section}", reason, f"false, or {model.section}.layout")


def _effect_problems(config: RunConfig) -> Iterator[Problem]:
    needs, kind = config.algorithm.needs, config.algorithm.advantage.kind
    for name, given, default, need, user in (
        ("critic", config.critic, CriticConfig(), "values", "gae"),
        ("outcome_model", config.outcome_model, OutcomeModelConfig(), "process_rewards", "prime"),
    ):
        changed = [each.name for each in fields(given) if getattr(given, each.name) != getattr(default, each.name)]
        if changed and need not in needs:
            path, reason = f"{name}.{changed[0]}", f"algorithm.advantage.kind={kind} does not ask it"
            yield problem(path, getattr(given, changed[0]), "has no effect", reason, f"leave it out, or algorithm.advantage.kind={user}")
        if need in needs and not config.trains_rewards:
            reason = f"{kind} needs {name}, which would be trained for an objective that is no part of the loss"
            fix = "distillation.trains_rewards=true, or an algorithm without it, as algorithm=grpo"
            yield problem("distillation.trains_rewards", False, f"must be true with {name}", reason, fix)
    if 0 < config.num_steps <= config.num_critic_steps:
        rule, reason = f"must be less than num_steps={config.num_steps}", "the policy learns nothing in these steps"
        yield problem("critic.warmup_steps", config.critic.warmup_steps, rule, reason, f"critic.warmup_steps={config.num_steps // 10}")


def _teacher_problems(distillation: DistillationConfig) -> Iterator[Problem]:
    path, taken = "distillation.teachers", dict[str, str]()
    others = [name for name, teacher in distillation.teachers.items() if not teacher.data_sources]
    if not distillation.teachers and distillation.shown is None:
        fix = f"{path}={{NAME: {{path: DIRECTORY}}}}, or distillation.shown for a policy that teaches itself"
        yield problem(path, {}, "must have a teacher", "there is nothing to come near", fix)
    if len(others) > 1:
        reason = f"{' and '.join(others)} are both for all that nobody names"
        yield problem(f"{path}.{others[1]}.data_sources", (), "must name sources", reason, "data_sources of all teachers but one")
    if others and distillation.shown is not None:
        reason = f"{others[0]} teaches all prompts that no other teacher names"
        yield problem("distillation.shown", distillation.shown, "has no effect", reason, f"leave it out, or data_sources of {others[0]}")
    if distillation.shown is not None and "{answer}" not in distillation.shown:
        reason = "the policy learns from itself only where it sees more than before"
        yield problem("distillation.shown", distillation.shown, "must have {answer}", reason, "distillation.shown='\\nAnswer: {answer}\\n'")
    for name, teacher in distillation.teachers.items():
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            reason, fix = "it is in the names of processes and files", "teachers.math"
            yield problem(f"{path}.{name}", name, "must be letters, digits, dashes and underscores", reason, fix)
        for source in teacher.data_sources:
            if source in taken:
                reason = f"{taken[source]} teaches it too"
                yield problem(f"{path}.{name}.data_sources", teacher.data_sources, f"names {source} again", reason, "one teacher for each")
            taken[source] = name


def _model_problems(config: RunConfig, facts: Facts, model: CompanionModel) -> Iterator[Problem]:
    if model.path is not None:
        facts = facts_of(ModelConfig(path=model.path, max_context=config.model.max_context))
        yield from (replace(fault, path=f"{model.section}.path") for fault in facts.faults)
        if facts.faults:
            return
        if config.model.path is not None:
            yield from tokenizer_problems(Path(config.model.path), model)
        if facts.shape is not None and config.model.max_context > facts.shape.max_positions:
            rule = f"must take model.max_context={config.model.max_context} tokens"
            reason = f"its config.json says max_position_embeddings={facts.shape.max_positions}"
            yield problem(f"{model.section}.path", model.path, rule, reason, f"model.max_context={facts.shape.max_positions}")
    if model.path is None and model.layout is None:
        return  # as the policy
    own = companion_config(config, model)
    for found in train_layout_problems(own, facts):
        if model.layout is not None:
            yield replace(found, path=found.path.replace("train.layout", f"{model.section}.layout"))
        else:
            reason = f"it is on the policy's ranks, with their layout: {found.path} = {found.value} {found.rule}"
            yield problem(f"{model.section}.path", model.path, "must fit train.layout", reason, f"a {model.section}.layout of its own")


def tokenizer_problems(policy: Path, model: CompanionModel) -> Iterator[Problem]:
    """`policy`: the folder of its model."""
    assert model.path is not None
    try:
        difference = tokenizer_difference(policy, Path(model.path))
    except (OSError, ValueError) as error:
        difference = str(error)
    if difference is not None:
        reason = f"both must mean the same by a token's number: {difference}"
        yield problem(f"{model.section}.path", model.path, "must have the policy's tokenizer", reason, "a model of the same tokenizer")
