"""Rules of the algorithm: what its parts need of a run, and which do not go together."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

from pydantic import ValidationError

from moerl.config.rules.facts import Facts
from moerl.config.schema.algorithm_config import AlgorithmConfig, GroupAdvantage, PassAtKAdvantage, ReinforceAdvantage
from moerl.config.schema.custom_part import CustomPart, load_class
from moerl.config.schema.loss_config import GMPO, TIS, IcePop, Rejection, SequenceMaskTIS
from moerl.config.schema.run_config import RunConfig
from moerl.types.errors import Problem, problem


def compares_samples(algorithm: AlgorithmConfig) -> bool:
    """A sample's advantage is relative to its group."""
    advantage = algorithm.advantage
    if isinstance(advantage, ReinforceAdvantage):
        return advantage.kind == "reinforce_pp_baseline"
    return isinstance(advantage, GroupAdvantage | PassAtKAdvantage)


def algorithm_problems(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    broken = list(_custom_problems(config.algorithm))
    yield from broken
    if not broken:  # what a class needs is asked of the class
        yield from _needs_problems(config)
        yield from _old_policy_problems(config)
    yield from _objective_problems(config.algorithm)
    yield from _filter_problems(config)
    yield from _bound_problems(config.algorithm)
    yield from _overlong_problems(config)


def _custom_problems(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    parts: dict[str, object] = {"advantage": algorithm.advantage, "objective": algorithm.objective}
    parts |= {f"corrections.{index}": correction for index, correction in enumerate(algorithm.corrections)}
    for name, part in parts.items():
        if not isinstance(part, CustomPart):
            continue
        path = f"algorithm.{name}.path"
        fix = f"{path}=file.py:Class, a dataclass as in docs/add-an-algorithm.md"
        source = part.path.rpartition(":")[0]
        if source.endswith(".py") and not Path(source).is_file():
            yield problem(path, part.path, "names no file", f"looked at {Path(source).absolute()}", fix)
            continue
        try:
            found = load_class(part.path)
        except Exception as error:  # whatever the user's module does when it is run
            yield problem(path, part.path, "must name a class that can be imported", f"{type(error).__name__}: {error}", fix)
            continue
        yield from _class_problems(name, part, found, path)


_METHODS = {"advantage": "__call__", "objective": "token_loss", "corrections": "weights"}


def _class_problems(name: str, part: CustomPart, found: type, path: str) -> Iterator[Problem]:
    method = _METHODS[name.partition(".")[0]]
    if not any(method in vars(base) for base in found.__mro__):  # a class itself can always be called
        reason = f"an {name.partition('.')[0]} is asked by it" if name != "advantage" else "an estimator is called"
        yield problem(path, part.path, f"must have {method}", reason, f"def {method}(self, ...) in class {found.__name__}")
    if name == "objective" and "metric_names" not in dir(found):
        yield problem(path, part.path, "must have metric_names", "sums of all ranks have a place for each", "metric_names = ()")
    selecting = [other for other in ("statistics", "select") if not callable(getattr(found, other, None))]
    if "whole_minibatch" in part.needs and selecting:
        reason = "its needs have whole_minibatch, and these choose from it"
        yield problem(path, part.path, f"must have {' and '.join(selecting)}", reason, "both, or leave whole_minibatch out of needs")
    names = [each.name for each in fields(found)] if is_dataclass(found) else []
    for setting in part.settings.keys() - names:
        where, reason = f"algorithm.{name}.settings.{setting}", f"the fields of {found.__name__} are its settings"
        yield problem(where, part.settings[setting], "is not a setting", reason, f"one of {', '.join(names)}" if names else "leave it out")
    try:
        part.build()
    except ValidationError as error:
        for details in error.errors():
            where = ".".join(map(str, details["loc"]))
            reason = f"the fields of {found.__name__} are its settings"
            yield problem(
                f"algorithm.{name}.settings.{where}", details["input"], details["msg"].lower(), reason, "a field as it is declared"
            )
    except Exception as error:
        yield problem(f"algorithm.{name}.settings", part.settings, "must make an object", f"{type(error).__name__}: {error}", "correct it")


def _needs_problems(config: RunConfig) -> Iterator[Problem]:
    needs, kind = config.algorithm.needs, config.algorithm.advantage.kind
    if "values" in needs:
        reason = "a run has no critic yet; moerl.algorithm_loss computes it from values that are given"
        yield problem("algorithm.advantage.kind", kind, "needs a critic", reason, "algorithm.advantage.kind=reinforce_pp")
    if "process_rewards" in needs:
        reason = "a run has no model of outcomes yet; moerl.algorithm_loss computes it from log-probs that are given"
        yield problem("algorithm.advantage.kind", kind, "needs a model of outcomes", reason, "algorithm.advantage.kind=rloo")
    if "whole_minibatch" in needs and config.train.router_replay != "off":
        reason = "its pass before an update routes tokens by itself, and would choose by other log-probs than the update has"
        yield problem(
            "train.router_replay", config.train.router_replay, "must be off for this objective", reason, "train.router_replay=off"
        )


def _old_policy_problems(config: RunConfig) -> Iterator[Problem]:
    algorithm, old = config.algorithm, config.train.old_logprobs
    by_rho = [each for each in algorithm.corrections if isinstance(each, TIS | IcePop | Rejection | SequenceMaskTIS)]
    if old == "rollout" and by_rho:
        rule = "has no effect with train.old_logprobs=rollout"
        reason = "it is a weight for old policy / server, which are the same then; the objective's ratio corrects alone"
        fix = "train.old_logprobs=trainer, or leave the corrections out"
        yield problem("algorithm.corrections", [each.kind for each in by_rho], rule, reason, fix)
    if old != "trainer" and "old_logprobs" in algorithm.needs:
        reason = "rejection, normalized weights and a KL in the reward look at the trainer's log-probs before the update"
        yield problem("train.old_logprobs", old, "must be trainer for this algorithm", reason, "train.old_logprobs=trainer")


def _objective_problems(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    objective, normalize_by = algorithm.objective, algorithm.normalize_by
    if isinstance(objective, GMPO) and normalize_by != "sequence":
        reason = "its loss is one number for a sequence, and a mean over sequences"
        yield problem("algorithm.normalize_by", normalize_by, "must be sequence for gmpo", reason, "algorithm.normalize_by=sequence")
    if normalize_by == "fixed_length" and algorithm.fixed_length is None:
        reason = "sums over sequences are divided by it"
        yield problem("algorithm.fixed_length", None, "must be given for normalize_by=fixed_length", reason, "the longest response")
    if normalize_by != "fixed_length" and algorithm.fixed_length is not None:
        rule, reason = "has no effect", f"it belongs to normalize_by=fixed_length, and normalize_by={normalize_by}"
        yield problem("algorithm.fixed_length", algorithm.fixed_length, rule, reason, "leave it out, or normalize_by=fixed_length")
    if algorithm.kl_coefficient > 0 and algorithm.kl_in == "reward" and algorithm.kl_estimator == "unbiased":
        reason = "its weight is policy / old policy, which is 1 before the update"
        yield problem("algorithm.kl_estimator", "unbiased", "is for kl_in=loss", reason, "algorithm.kl_estimator=k3")
    if algorithm.kl_target is not None and algorithm.kl_coefficient == 0:
        reason = "a coefficient of 0 stays 0, whatever it is multiplied by"
        yield problem("algorithm.kl_target", algorithm.kl_target, "needs kl_coefficient > 0", reason, "algorithm.kl_coefficient=0.001")


def _filter_problems(config: RunConfig) -> Iterator[Problem]:
    if not config.filters_samples:
        return
    filters = {f"rollout.{name}": getattr(config.rollout, name) for name in ("top_p", "top_k")}
    path, value = next((path, value) for path, value in filters.items() if value not in (0, 1.0))
    engine, algorithm = config.rollout.engine, config.algorithm
    if engine != "hf":
        reason = f"rollout.engine={engine} does not say what they left of the vocabulary, and log-probs would be of another distribution"
        yield problem(path, value, "needs rollout.engine=hf", reason, "rollout.top_p=1.0 and rollout.top_k=0, or rollout.engine=hf")
    if algorithm.kl_coefficient > 0 and algorithm.kl_in == "reward":
        reason = "a KL is over the whole vocabulary, and the log-probs before the update are of a part of it"
        yield problem("algorithm.kl_in", "reward", f"must be loss with {path}={value}", reason, "algorithm.kl_in=loss")


def _bound_problems(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    for index, correction in enumerate(algorithm.corrections):
        low, high = getattr(correction, "low", None), getattr(correction, "high", None)
        path = f"algorithm.corrections.{index}"
        if low is not None and high is not None and low >= high:
            yield problem(f"{path}.low", low, f"must be less than high={high}", "everything would be outside", f"{path}.low={high / 2}")
        if isinstance(correction, Rejection) and low is None and high is None:
            yield problem(f"{path}.high", None, "needs a bound", "without low and high nothing is rejected", f"{path}.high=2.0")


def _overlong_problems(config: RunConfig) -> Iterator[Problem]:
    algorithm, limit = config.algorithm, config.rollout.max_response_tokens
    buffer, path = algorithm.overlong_buffer, "algorithm.overlong_buffer"
    if algorithm.overlong != "penalty":
        if buffer is not None:
            reason = f"it is the length of the penalty's ramp, and algorithm.overlong={algorithm.overlong}"
            yield problem(path, buffer, "has no effect", reason, "leave it out, or algorithm.overlong=penalty")
    elif buffer is None:
        reason = "the penalty grows over this many tokens before rollout.max_response_tokens"
        yield problem(path, None, "must be given for overlong=penalty", reason, f"{path}={max(1, limit // 5)}, or algorithm.overlong=mask")
    elif buffer >= limit:
        reason = f"the penalty starts at max_response_tokens - overlong_buffer = {limit - buffer} tokens"
        fix = f"{path}={max(1, limit // 5)}"
        yield problem(path, buffer, f"must be less than rollout.max_response_tokens={limit}", reason, fix)
