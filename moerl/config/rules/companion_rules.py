"""Rules of the models beside the policy: whether they are needed, what they start from, where they are."""

import re
from collections.abc import Collection, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from moerl.config.derive.companion_models import CompanionModel, companion_config, companion_models
from moerl.config.rules.algorithm_rules import custom_problems
from moerl.config.rules.facts import Facts, Rule, facts_of
from moerl.config.rules.fp8_rules import fp8_problems
from moerl.config.rules.megatron_rules import megatron_problems
from moerl.config.rules.memory_rules import memory_problems
from moerl.config.rules.parallel_rules import train_layout_problems
from moerl.config.rules.run_rules import micro_batch_problems, optimizer_problems
from moerl.config.schema.companion_config import CriticConfig, DistillationConfig, OutcomeModelConfig
from moerl.config.schema.model_config import ModelConfig
from moerl.config.schema.run_config import RunConfig
from moerl.types.errors import Problem, problem
from moerl.types.json_text import read_object


def companion_problems(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    if any(custom_problems(config.algorithm)):
        return
    yield from _effect_problems(config)
    if config.distillation is not None:
        yield from _teacher_problems(config.distillation)
        if config.filters_samples and not config.replays_sets:
            reason = "servers say log-probs among what they left of the vocabulary, so that every likely token looks as if it had fallen"
            yield problem("train.sampling_replay", "off", "must be rollout with distillation", reason, "train.sampling_replay=rollout")
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
    if not config.trains_rewards:
        yield from _unused_problems(config)
    if 0 < config.num_steps <= config.num_critic_steps:
        rule, reason = f"must be less than num_steps={config.num_steps}", "the policy learns nothing in these steps"
        yield problem("critic.warmup_steps", config.critic.warmup_steps, rule, reason, f"critic.warmup_steps={config.num_steps // 10}")


def _unused_problems(config: RunConfig) -> Iterator[Problem]:
    """Parts of a loss that is not trained."""
    algorithm = config.algorithm
    for name, is_set in (
        ("kl_coefficient", algorithm.kl_coefficient > 0), ("entropy_bonus", algorithm.entropy_bonus > 0),
        ("drift_penalty", algorithm.drift_penalty > 0), ("corrections", algorithm.corrections != ()),
    ):  # fmt: skip
        if is_set:
            reason = "distillation.trains_rewards=false: the distance from the teacher is the only loss"
            fix = "leave it out, or distillation.trains_rewards=true"
            yield problem(f"algorithm.{name}", getattr(algorithm, name), "has no effect", reason, fix)


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


def _model_problems(config: RunConfig, policy_facts: Facts, model: CompanionModel) -> Iterator[Problem]:
    facts = policy_facts
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
    own, known = companion_config(config, model), {(each.path, each.rule) for rule in _RULES for each in rule(config, policy_facts)}
    for found in (each for rule in _RULES for each in rule(own, facts)):
        part = next((name for name in ("layout", "optimizer") if found.path.startswith(f"train.{name}")), None)
        if part is not None and getattr(model, part) is not None:
            yield replace(found, path=found.path.replace("train", model.section, 1), fix=found.fix.replace("train.", f"{model.section}."))
        elif (found.path, found.rule) not in known:  # else it is the policy's problem
            where = "on the policy's ranks, with their layout" if model.layout is None else "on its own ranks"
            reason = f"it is {where}, and {found.path} = {found.value} {found.rule}: {found.reason}"
            yield problem(
                f"{model.section}.path", model.path, f"must fit {found.path}", reason, f"another one, or a {model.section}.layout"
            )
    fp8 = config.train.fp8
    if model.layout is None and fp8 is not None and fp8.recipe == "delayed":
        reason = f"Transformer Engine keeps the scales of all models of a process together, and {model.section} is on the policy's ranks"
        yield problem(
            "train.fp8.recipe", "delayed", f"cannot go with {model.section}", reason, f"another recipe, or {model.section}.layout"
        )


_RULES: tuple[Rule, ...] = (
    train_layout_problems, micro_batch_problems, optimizer_problems, memory_problems, megatron_problems, fp8_problems,
)  # fmt: skip
"""Rules of `train` that hold for each by its own layout, optimizer and model."""


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


def source_problems(distillation: DistillationConfig, sources: Collection[str]) -> Iterator[Problem]:
    """`sources`: those of the data set."""
    there, named = ", ".join(sorted(sources)), {name for teacher in distillation.teachers.values() for name in teacher.data_sources}
    for name, teacher in distillation.teachers.items():
        if unknown := sorted(set(teacher.data_sources) - set(sources)):
            path, reason = f"distillation.teachers.{name}.data_sources", f"rows have data_source {there}"
            yield problem(path, teacher.data_sources, f"names {', '.join(unknown)}, which no row has", reason, "one of these")
    has_others = distillation.shown is not None or any(not teacher.data_sources for teacher in distillation.teachers.values())
    if (left := sorted(set(sources) - named)) and not has_others and not distillation.trains_rewards:
        reason = f"rows have data_source {', '.join(left)} too, from which nothing would be learned"
        fix = "a teacher without data_sources, distillation.shown, or distillation.trains_rewards=true"
        yield problem("distillation.teachers", sorted(distillation.teachers), "must teach all sources", reason, fix)


_BINARY = ("tokenizer.model", "tiktoken.model", "tekken.json", "vocab.json")
"""Files of tokenizers without a tokenizer.json."""


def tokenizer_difference(ours: Path, theirs: Path) -> str | None:
    """Difference between the tokens of two checkpoints' folders, as text for people; None: there is none. Raises OSError and ValueError
    for a file that cannot be read."""
    files = [folder / "tokenizer.json" for folder in (ours, theirs)]
    if all(file.is_file() for file in files):
        numbers, others = (_numbers(file) for file in files)
        wrong = sorted(token for token in numbers if others.get(token) != numbers[token])
        if not wrong:
            return None
        token = wrong[0]
        number = f"has number {others[token]}" if token in others else "is unknown"
        return f"{len(wrong)} of {len(numbers)} tokens differ; {token!r} has number {numbers[token]} in {ours}, and {number} in {theirs}"
    own, other = ({name: (folder / name).read_bytes() for name in _BINARY if (folder / name).is_file()} for folder in (ours, theirs))
    if own and own == other:
        return None
    return f"{ours} has {', '.join(own) or 'no tokenizer.json'}, and {theirs} {', '.join(other) or 'another'}"


def _numbers(file: Path) -> dict[str, int]:
    """Token -> number. The vocabulary is a table, or a list of (token, score) in the order of the numbers."""
    tokenizer = read_object(file)
    try:
        vocab: Any = tokenizer["model"]["vocab"]
        numbers = dict(vocab) if isinstance(vocab, dict) else {token: number for number, (token, _) in enumerate(vocab)}
        return numbers | {token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file}: is no tokenizer of the library tokenizers: {error!r}") from error
