"""Rules of the algorithm: what its parts need of a run, and which do not go together."""

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

from pydantic import ValidationError

from moerl.config.rules.facts import Facts
from moerl.config.schema.algorithm_config import AlgorithmConfig, GroupAdvantage, PassAtKAdvantage, PrimeAdvantage, ReinforceAdvantage
from moerl.config.schema.correction_config import TIS, IcePop, Rejection, SequenceMaskTIS
from moerl.config.schema.custom_part import CustomPart, load_class, reread_if_changed
from moerl.config.schema.loss_config import GMPO, GSPO
from moerl.config.schema.rollout_config import MOST_LEFT
from moerl.config.schema.run_config import RunConfig
from moerl.types.engine_traits import TRAITS
from moerl.types.errors import NOT_SET, Problem, problem


def compares_samples(algorithm: AlgorithmConfig) -> bool:
    """A sample's advantage is relative to its group."""
    advantage = algorithm.advantage
    if isinstance(advantage, ReinforceAdvantage):
        return advantage.kind == "reinforce_pp_baseline"
    return isinstance(advantage, GroupAdvantage | PassAtKAdvantage | PrimeAdvantage)


def corrects_staleness(algorithm: AlgorithmConfig) -> bool:
    """A correction weighs by the probability that the server sampled with."""
    return any(isinstance(each, TIS | IcePop | Rejection | SequenceMaskTIS | CustomPart) for each in algorithm.corrections)


def algorithm_problems(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    broken = list(custom_problems(config.algorithm))
    yield from broken
    if not broken:  # what a class needs is asked of the class
        yield from _needs_problems(config)
        yield from _old_policy_problems(config)
    yield from _objective_problems(config.algorithm)
    yield from _kl_problems(config)
    yield from _filter_problems(config)
    yield from _advantage_problems(config)
    yield from _bound_problems(config.algorithm)
    yield from _overlong_problems(config)


def custom_problems(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """Problems of classes of one's own; where there is one, nobody may ask what the algorithm needs."""
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
        if source.endswith(".py"):
            reread_if_changed(part.path)
        try:
            found = load_class(part.path)
        except (Exception, SystemExit) as error:  # whatever the user's module does when it is run
            yield problem(path, part.path, "must name a class that can be imported", f"{type(error).__name__}: {error}", fix)
            continue
        yield from _class_problems(name, part, found, path)


_METHODS = {"advantage": "__call__", "objective": "token_loss", "corrections": "weights"}


def _class_problems(name: str, part: CustomPart, found: type, path: str) -> Iterator[Problem]:
    role = name.partition(".")[0]
    method = _METHODS[role]
    if not is_dataclass(found):
        fix = f"@dataclass(frozen=True) above class {found.__name__}"
        yield problem(path, part.path, "must be a dataclass", "its fields are the settings", fix)
        return
    if not any(method in vars(base) for base in found.__mro__):  # a class itself can always be called
        fix = f"def {method}(self, ...) in class {found.__name__}"
        yield problem(path, part.path, f"must have {method}", f"{role} is asked by it", fix)
    needs = getattr(found, "needs", ())
    if not isinstance(needs, set | frozenset | tuple | list) or not set(needs) <= _NEEDS[role]:
        rule, fix = f"needs must be a set of {', '.join(sorted(_NEEDS[role]))}", "needs = frozenset() for none"
        yield problem(path, part.path, rule, f"it is {needs!r}, which no step can bring for {role}", fix)
    told = getattr(found, "metric_names", None)
    is_told = isinstance(told, property) or (isinstance(told, tuple) and all(isinstance(each, str) for each in told))
    if role == "objective" and not is_told:
        reason = "sums of all ranks have a place for each"
        yield problem(path, part.path, "must have metric_names, a tuple of names", reason, "metric_names = ()")
    selecting = [other for other in ("statistics", "select") if not callable(getattr(found, other, None))]
    if "whole_minibatch" in part.needs and selecting:
        reason = "its needs have whole_minibatch, and these choose from it"
        yield problem(path, part.path, f"must have {' and '.join(selecting)}", reason, "both, or leave whole_minibatch out of needs")
    yield from _setting_problems(f"algorithm.{name}.settings", part, found)


def _setting_problems(path: str, part: CustomPart, found: type) -> Iterator[Problem]:
    names, reason = [each.name for each in fields(found)], f"the fields of {found.__name__} are its settings"
    for setting in part.settings.keys() - names:
        fix = f"one of {', '.join(names)}" if names else "leave it out"
        yield problem(f"{path}.{setting}", part.settings[setting], "is not a setting", reason, fix)
    try:
        part.build()
    except ValidationError as error:
        for details in error.errors():
            where = ".".join(map(str, [path, *details["loc"]]))
            is_missing = details["type"] == "missing"
            value = NOT_SET if is_missing else details["input"]
            yield problem(where, value, "must be given" if is_missing else details["msg"].lower(), reason, f"{where}=VALUE")
    except Exception as error:
        yield problem(path, part.settings, "must make an object", f"{type(error).__name__}: {error}", "settings that the class takes")


_NEEDS: dict[str, set[str]] = {
    "advantage": {"reference", "old_logprobs", "greedy_sample", "values", "process_rewards", "tokens"},
    "objective": {"reference", "old_logprobs", "whole_minibatch"},
    "corrections": {"reference", "old_logprobs"},
}


def _needs_problems(config: RunConfig) -> Iterator[Problem]:
    needs = config.algorithm.needs
    if "tokens" in needs and config.train.router_replay == "rollout":
        reason = "the driver would fetch the routes of all tokens with them"
        fix = "train.router_replay=off or trainer, or an advantage without tokens in its needs"
        yield problem("train.router_replay", "rollout", "cannot go with an advantage that needs tokens", reason, fix)


def _old_policy_problems(config: RunConfig) -> Iterator[Problem]:
    algorithm, old = config.algorithm, config.train.old_logprobs
    if algorithm.drift_penalty > 0 and old == "trainer" and config.train.updates_per_step == 1:
        rule, reason = (
            "has no effect with one update per step",
            "the policy has not moved from the old one, and neither has the penalty a gradient",
        )
        fix = "algorithm.drift_penalty=0, or train.updates_per_step=2"
        yield problem("algorithm.drift_penalty", algorithm.drift_penalty, rule, reason, fix)
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
    if isinstance(objective, GSPO):
        for name in ("clip_low", "clip_high"):
            bound = getattr(objective, name)
            if bound is not None and bound > 0.1:
                path = f"algorithm.objective.{name}"
                reason = "it bounds the mean of a sequence, which moves hundreds of times less than a token: nothing would be clipped"
                yield problem(path, bound, f"must be at most 0.1 for {objective.kind}", reason, f"{path}=0.0004")
    if normalize_by == "fixed_length" and algorithm.fixed_length is None:
        reason = "sums over sequences are divided by it"
        yield problem("algorithm.fixed_length", None, "must be given for normalize_by=fixed_length", reason, "the longest response")
    if normalize_by != "fixed_length" and algorithm.fixed_length is not None:
        rule, reason = "has no effect", f"it belongs to normalize_by=fixed_length, and normalize_by={normalize_by}"
        yield problem("algorithm.fixed_length", algorithm.fixed_length, rule, reason, "leave it out, or normalize_by=fixed_length")


def _kl_problems(config: RunConfig) -> Iterator[Problem]:
    algorithm = config.algorithm
    if algorithm.kl_coefficient > 0 and algorithm.kl_in == "reward" and algorithm.kl_estimator == "unbiased":
        reason = "its weight is policy / old policy, which is 1 before the update"
        yield problem("algorithm.kl_estimator", "unbiased", "is for kl_in=loss", reason, "algorithm.kl_estimator=k3")
    if algorithm.kl_target is not None and algorithm.kl_coefficient == 0:
        reason = "a coefficient of 0 stays 0, whatever it is multiplied by"
        yield problem("algorithm.kl_target", algorithm.kl_target, "needs kl_coefficient > 0", reason, "algorithm.kl_coefficient=0.001")
    samples = config.groups_per_step * config.group_size
    if algorithm.kl_target is not None and 5 * algorithm.kl_horizon <= samples:
        rule = f"must be over {samples // 5}, a fifth of a step's samples"
        reason = "a step far below the target would turn the coefficient's sign"
        yield problem("algorithm.kl_horizon", algorithm.kl_horizon, rule, reason, f"algorithm.kl_horizon={samples}")


def _advantage_problems(config: RunConfig) -> Iterator[Problem]:
    algorithm, kind = config.algorithm, config.algorithm.advantage.kind
    shaped = {"algorithm.whiten_rewards": algorithm.whiten_rewards, "algorithm.overlong": algorithm.overlong == "penalty"}
    shaped["algorithm.kl_in"] = algorithm.kl_coefficient > 0 and algorithm.kl_in == "reward" and kind == "maxrl"
    for path in [path for path, is_on in shaped.items() if is_on and kind in ("maxrl", "remax")]:
        value = getattr(algorithm, path.removeprefix("algorithm."))
        reason = {
            "maxrl": "it divides by the mean reward of a group, which must not be negative: the better sample would be pushed down",
            "remax": "the reward at temperature 0 that it subtracts is as it was scored, and would be of another scale",
        }[kind]
        yield problem(path, value, f"cannot go with {kind}", reason, f"leave it out, or algorithm.advantage.kind={_OTHER[kind]}")
    if isinstance(algorithm.advantage, ReinforceAdvantage) and kind == "reinforce_pp_baseline" and algorithm.advantage.gamma < 1:
        reason = "every token of a sample gets the same, and nothing is discounted"
        fix = "leave it out, or algorithm.advantage.kind=reinforce_pp"
        yield problem("algorithm.advantage.gamma", algorithm.advantage.gamma, f"has no effect with {kind}", reason, fix)
    if algorithm.max_attempts > 1 and config.group_size < 2:
        reason = "dynamic sampling drops groups whose samples all have the same reward, which a group of one always is"
        yield problem("algorithm.max_attempts", algorithm.max_attempts, "needs group_size >= 2", reason, "algorithm.max_attempts=1")


_OTHER = {"maxrl": "rloo", "remax": "reinforce_pp"}


def _filter_problems(config: RunConfig) -> Iterator[Problem]:
    if not config.filters_samples:
        return
    rollout, algorithm = config.rollout, config.algorithm
    path, value = ("rollout.top_p", rollout.top_p) if rollout.top_p < 1 else ("rollout.top_k", rollout.top_k)
    if rollout.top_k == 1:
        reason = "it leaves one token, whose log-prob is 0 whatever the weights are: nothing can be learned"
        yield problem("rollout.top_k", 1, "must be 0 or at least 2", reason, "rollout.top_k=0")
    bias = -math.log(rollout.top_p)
    if config.train.sampling_replay == "off" and config.mismatch_limit < bias:
        rule = f"needs weights.mismatch_limit above -log(rollout.top_p) = {bias:.3g}"
        reason = "trainer and server then differ by what was left out, which looks like wrong weights"
        yield problem(
            "train.sampling_replay", "off", rule, reason, f"train.sampling_replay=rollout, or weights.mismatch_limit={2 * bias:.2g}"
        )
    yield from _engine_filter_problems(config, path, value)
    if algorithm.kl_coefficient > 0 and algorithm.kl_in == "reward" and config.replays_sets:
        reason = "a KL is over the whole vocabulary, and the log-probs before the update are of a part of it"
        yield problem("algorithm.kl_in", "reward", f"must be loss with {path}={value}", reason, "algorithm.kl_in=loss")


def _engine_filter_problems(config: RunConfig, path: str, value: float) -> Iterator[Problem]:
    """Problems of engines that have to say what they left of the vocabulary."""
    rollout = config.rollout
    if rollout.engine == "sglang":
        if not 1 < rollout.top_k <= MOST_LEFT and rollout.top_k != 1:
            reason = f"SGLang says of a token at most {MOST_LEFT} entries that were left, and wants top_k to bound them"
            yield problem("rollout.top_k", rollout.top_k, f"must be in [2, {MOST_LEFT}]", reason, f"rollout.top_k={MOST_LEFT // 8}")
        if rollout.layout.mtp_tokens:
            reason = "what was left is then of drafts too"
            fix = "rollout.layout.mtp_tokens=0, or rollout.top_p=1.0 and rollout.top_k=0"
            yield problem(path, value, "needs rollout.layout.mtp_tokens=0", reason, fix)
    elif rollout.traits.no_sets:
        reason = f"{rollout.traits.no_sets}, and log-probs would be of another distribution"
        able = " or ".join(engine for engine, traits in TRAITS.items() if not traits.no_sets)
        fix = f"rollout.top_p=1.0 and rollout.top_k=0, or rollout.engine={able}"
        yield problem(path, value, f"needs rollout.engine={able}", reason, fix)


def _bound_problems(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    for index, correction in enumerate(algorithm.corrections):
        low, high = getattr(correction, "low", None), getattr(correction, "high", None)
        path = f"algorithm.corrections.{index}"
        if low is not None and high is not None and low >= high:
            yield problem(f"{path}.low", low, f"must be less than high={high}", "everything would be outside", f"{path}.low={high / 2}")
        is_ratio = isinstance(correction, IcePop | SequenceMaskTIS) or (isinstance(correction, Rejection) and correction.statistic == "k1")
        if is_ratio and (low or 0) < (math.inf if high is None else high) and not (low or 0) < 1 < (math.inf if high is None else high):
            reason = "rho is 1 where server and trainer agree, and everything would be outside"
            yield problem(path, {"low": low, "high": high}, "must have 1 between its bounds", reason, f"{path}.low=0.5 {path}.high=2.0")
        if isinstance(correction, Rejection) and correction.statistic != "k1" and low:
            reason = f"{correction.statistic} is 0 where server and trainer agree, and those tokens would be outside"
            yield problem(f"{path}.low", low, f"must be null for {correction.statistic}", reason, f"{path}.low=null")
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
