"""Parts of an algorithm that do not go together, or that a run cannot give what they need, are refused with what to write instead."""

import pytest

from moerl.config.load import load
from moerl.types.errors import ConfigError

DEMO = "recipe=grpo-tiny-moe-1n2g-sync"
ASYNC = "recipe=dapo-tiny-moe-1n2g-async"


def refused(*overrides):
    with pytest.raises(ConfigError) as caught:
        load(list(overrides))
    return {problem.path: f"{problem.rule}; {problem.fix}" for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["rollout.top_k=4", "rollout.engine=vllm"], "needs rollout.engine=hf or sglang"),
        (["rollout.top_p=0.9", "rollout.engine=sglang"], "must be in [2, 4096]"),
        (["rollout.top_k=9", "rollout.engine=sglang", "rollout.layout.mtp_tokens=1"], "mtp_tokens=0"),
    ],
)
def test_an_engine_must_say_what_it_leaves_of_the_vocabulary(overrides, said):
    """Whether it is installed or not."""
    assert said in refused(DEMO, *overrides)["rollout.top_k"]


@pytest.mark.parametrize(
    ("engine", "setting", "value", "said"),
    [
        ("vllm", "rollout.temperature", "0.005", "must be in [0.01, 2] with rollout.engine=vllm; rollout.temperature=0.01, or"),
        ("vllm", "rollout.temperature", "2.5", "must be in [0.01, 2] with rollout.engine=vllm; rollout.temperature=2, or"),
        ("vllm", "eval.temperature", "0.005", "must be in [0.01, 2]"),
        ("sglang", "rollout.temperature", "1e-7", "must be at least 1e-06"),
    ],
)
def test_a_temperature_at_which_the_engine_does_not_sample_is_refused(engine, setting, value, said):
    """vLLM raises lower ones, and its log-probs are of what it took."""
    assert said in refused(DEMO, "eval=tiny-repeat", f"rollout.engine={engine}", "rollout.python=/absent", f"{setting}={value}")[setting]


@pytest.mark.parametrize("engine", ["vllm", "hf"])
def test_an_evaluation_at_temperature_zero_is_taken_by_every_engine(engine):
    overrides = ("eval.temperature=0", f"rollout.engine={engine}", "rollout.python=/absent", "groups_per_step=0")
    assert "eval.temperature" not in refused(DEMO, "eval=tiny-repeat", *overrides)


@pytest.mark.parametrize(
    ("overrides", "path", "said"),
    [
        (["algorithm=gmpo", "algorithm.normalize_by=token"], "algorithm.normalize_by", "must be sequence for gmpo"),
        (["algorithm.normalize_by=fixed_length"], "algorithm.fixed_length", "must be given"),
        (["algorithm.fixed_length=8"], "algorithm.fixed_length", "has no effect"),
        (["algorithm.corrections=[{kind: tis}]", "train.old_logprobs=rollout"], "algorithm.corrections", "train.old_logprobs=trainer"),
        (
            ["algorithm.corrections=[{kind: rejection, high: 2}]", "train.old_logprobs=log_linear"],
            "train.old_logprobs", "must be trainer",
        ),
        (["algorithm.corrections=[{kind: rejection}]"], "algorithm.corrections.0.high", "needs a bound"),
        (["algorithm.corrections=[{kind: icepop, low: 2, high: 1}]"], "algorithm.corrections.0.low", "must be less than high=1"),
        (
            ["algorithm.kl_coefficient=0.1", "algorithm.kl_in=reward", "train.old_logprobs=rollout"],
            "train.old_logprobs", "must be trainer",
        ),
        (
            ["algorithm.kl_coefficient=0.1", "algorithm.kl_in=reward", "algorithm.kl_estimator=unbiased"],
            "algorithm.kl_estimator", "is for kl_in=loss",
        ),
        (["algorithm.kl_target=0.1"], "algorithm.kl_target", "needs kl_coefficient > 0"),
        (
            ["algorithm.kl_target=0.1", "algorithm.kl_coefficient=0.1", "algorithm.kl_horizon=51"],
            "algorithm.kl_horizon", "must be over 51, a fifth of a step's samples",
        ),
        (
            ["algorithm.corrections=[{kind: rejection, statistic: k3, low: 0.1}]"],
            "algorithm.corrections.0.low", "must be null for k3",
        ),
        (["algorithm.drift_penalty=0.1"], "algorithm.drift_penalty", "has no effect with one update per step"),
        (["rollout.top_k=1"], "rollout.top_k", "must be 0 or at least 2"),
        (["rollout.top_p=0.9", "train.sampling_replay=off"], "train.sampling_replay", "weights.mismatch_limit=0.21"),
        (["rollout.top_k=4", "rollout.engine=fake"], "rollout.top_k", "needs rollout.engine=hf"),
        (["algorithm=maxrl", "algorithm.whiten_rewards=true"], "algorithm.whiten_rewards", "cannot go with maxrl"),
        (["algorithm=remax", "algorithm.whiten_rewards=true"], "algorithm.whiten_rewards", "cannot go with remax"),
        *((
            [f"algorithm={name}", "algorithm.overlong=penalty", "algorithm.overlong_buffer=2"],
            "algorithm.overlong", f"cannot go with {name}",
        ) for name in ("maxrl", "remax")),
        (["algorithm=maxrl", "algorithm.kl_coefficient=0.1", "algorithm.kl_in=reward"], "algorithm.kl_in", "cannot go with maxrl"),
        (
            ["rollout.top_p=0.9", "algorithm.kl_coefficient=0.1", "algorithm.kl_in=reward"],
            "algorithm.kl_in", "must be loss with rollout.top_p=0.9",
        ),
        (["algorithm=reinforce_pp", "algorithm.max_attempts=2", "group_size=1"], "algorithm.max_attempts", "needs group_size >= 2"),
        (
            ["algorithm=reinforce_pp_baseline", "algorithm.advantage.gamma=0.9"],
            "algorithm.advantage.gamma", "has no effect with reinforce_pp_baseline",
        ),
        (["algorithm=gspo", "algorithm.objective.clip_high=0.2"], "algorithm.objective.clip_high", "must be at most 0.1 for gspo"),
        (["algorithm.corrections=[{kind: icepop, low: 2}]"], "algorithm.corrections.0", "must have 1 between its bounds"),
        (["group_size=1"], "group_size", "must be at least 2"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(overrides, path, said):
    found = refused(DEMO, *overrides)
    assert said in found[path], found
    assert len(found) == 1


def test_without_a_comparison_of_samples_one_is_enough():
    assert load([DEMO, "algorithm=reinforce_pp", "group_size=1"]).group_size == 1


@pytest.mark.parametrize("mode", ["rollout", "trainer"])
def test_an_objective_that_chooses_from_the_mini_batch_goes_with_replayed_routes(mode):
    assert "whole_minibatch" in load([DEMO, "algorithm=m2po", f"train.router_replay={mode}"]).algorithm.needs


def test_stale_samples_need_a_correction():
    opsm = "algorithm.corrections=[{kind: opsm}]"
    assert "train.old_logprobs" in refused(ASYNC, "train.old_logprobs=trainer", opsm)
    assert "needs algorithm.corrections" in refused(ASYNC, "train.old_logprobs=trainer")["train.old_logprobs"]
    corrected = load([ASYNC, "train.old_logprobs=trainer", "algorithm.corrections=[{kind: tis}]"])
    assert not corrected.needs_old_logprobs
    assert load([ASYNC, "train.old_logprobs=log_linear"]).train.old_logprobs == "log_linear"


def test_what_an_algorithm_needs_decides_the_passes_of_a_step():
    assert not load([DEMO]).needs_old_logprobs
    assert load([DEMO, "algorithm.corrections=[{kind: rejection, high: 2}]"]).needs_old_logprobs
    assert load([DEMO, "algorithm.corrections=[{kind: tis, normalized: true}]"]).needs_old_logprobs
    reward = load([DEMO, "algorithm.kl_coefficient=0.1", "algorithm.kl_in=reward"])
    assert reward.needs_old_logprobs and reward.uses_reference
    assert not load([DEMO]).uses_reference
