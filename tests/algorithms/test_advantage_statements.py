"""Advantages and what comes before them, against their statements in plain Python."""

import math
import random
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

import plain_statements as plain

from moerl.algorithms.advantages import ScoredStep, advantage_estimator
from moerl.config.algorithm_settings import of_plain
from moerl.config.schema.algorithm_config import GroupAdvantage, PassAtKAdvantage
from moerl.train.loss.algorithm_loss import TokenArrays, algorithm_loss

SEEDS = st.integers(0, 10**6)
KINDS = {
    "grpo": {"kind": "grpo"},
    "dr_grpo": {"kind": "dr_grpo"},
    "rloo": {"kind": "rloo"},
    "opo": {"kind": "opo"},
    "gpg": {"kind": "gpg"},
    "maxrl": {"kind": "maxrl"},
    "passk": {"kind": "passk", "by_std": False},
    "passk_by_std": {"kind": "passk", "by_std": True},
    "reinforce_pp": {"kind": "reinforce_pp", "gamma": 0.9},
    "reinforce_pp_baseline": {"kind": "reinforce_pp_baseline"},
    "remax": {"kind": "remax"},
    "gae": {"kind": "gae", "gamma": 0.9, "lam": 0.8},
    "prime": {"kind": "prime", "beta": 0.3},
}
OF_GROUPS = sorted(set(KINDS) - {"reinforce_pp", "remax", "gae"})
ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k3+", "abs+", "unbiased")
OVERLONG = [{"overlong": "penalty", "overlong_buffer": 3}, {"overlong": "mask"}, {"overlong": "none"}]
STYLES = ("any", "ties", "balanced", "constant")
PLAIN = {
    "objective": {"kind": "reinforce"},
    "normalize_by": "token",
    "kl_coefficient": 0.0,
    "kl_estimator": "k3",
    "kl_in": "loss",
    "whiten_rewards": False,
    "overlong": "none",
}


def few(count):
    """Without search for a smaller seed, which says no more."""
    return settings(derandomize=True, deadline=None, max_examples=count, phases=[Phase.generate])


def random_rewards(rng, style, groups):
    """Eighths, whose sums are exact: what equals a group's mean does so in any order of the sum. Constant groups have any number."""
    drawn = {
        "any": lambda: rng.randint(-16, 16) / 8,
        "ties": lambda: rng.choice([0.0, 1.0]),
        "balanced": lambda: rng.choice([-1.0, 1.0]),
        "constant": lambda: rng.randint(-16, 16) / 8,
    }[style]
    constant = {g: rng.choice([0.1, 0.7, 1.0, 0.0]) for g in groups if style == "constant" and rng.random() < 0.6}
    return [constant.get(g, drawn()) for g in groups]


def random_step(seed, *, style="any", sizes=(1, 2, 3, 4)):
    """Three groups, out of order; samples of 1 to 3 sequences of 1 to 6 tokens with holes; some without a response token."""
    rng = random.Random(seed)
    groups = [g for g, size in enumerate(rng.sample(sizes, 3)) for _ in range(size)]
    rng.shuffle(groups)
    owner = [k for k in range(len(groups)) for _ in range(rng.randint(1, 3))]
    empty = [rng.random() < 0.15 for _ in groups]
    mask = [[not empty[k] and rng.random() < 0.6 for _ in range(rng.randint(1, 6))] for k in owner]
    mask[-1] = [True, False, True]

    def column(outside=math.nan):
        return [[-rng.expovariate(1) if inside else outside for inside in row] for row in mask]

    step = plain.Columns(
        mask=mask, owner=owner, groups=groups, rewards=random_rewards(rng, style, groups), max_response_tokens=8,
        truncated=[rng.random() < 0.3 for _ in groups], greedy=[rng.uniform(-1, 1) for _ in groups],
        old=column(), ref=column(), values=column(), process=column(),
    )  # fmt: skip
    return step, column()


def flat(rows):
    return np.array([x for row in rows for x in row])


def padded(rows):
    """[B, T]: outside of a sequence NaN, or not in the mask."""
    width = max(map(len, rows)) + 1
    return np.array([row + [False if isinstance(row[0], bool) else math.nan] * (width - len(row)) for row in rows])


def project(s, step, logp, *, layout=flat, new_values=None, **options):
    named = {"mask": step.mask, "logprobs": logp, "old_logprobs": step.old, "reference_logprobs": step.ref}
    named |= {"values": step.values, "process_logprobs": step.process}
    named |= {} if new_values is None else {"new_values": new_values}
    columns = {name: layout(rows) for name, rows in named.items()}
    lengths = [len(row) for row in step.mask] if layout is flat else None
    return algorithm_loss(
        of_plain(PLAIN | s), TokenArrays(lengths=lengths, **columns), rewards=step.rewards, groups=step.groups, samples=step.owner,
        greedy_rewards=step.greedy, truncated=step.truncated, max_response_tokens=step.max_response_tokens,
        **options,
    )  # fmt: skip


def assert_equal(step, column, expected):
    """Tokens without an expected number have 0."""
    places = [(i, t) for i, row in enumerate(step.mask) for t in range(len(row))]
    assert column.tolist() == pytest.approx([expected.get(place, 0.0) for place in places], rel=1e-9, abs=1e-10)


def assert_as_stated(s, drawn):
    step, logp = drawn
    result, (advantages, returns) = project(s, step, logp), plain.advantages(PLAIN | s, step)
    assert_equal(step, result.advantages, advantages)
    assert_equal(step, result.kept, dict.fromkeys(advantages, True))
    assert (result.returns is None) == (returns is None)
    if returns is not None:
        assert_equal(step, result.returns, returns)


def assume_no_rounding(s, step):
    """Whether a mean is 0, or a reward the mean of rewards that differ, must not hang on the order of a sum: gpg and maxrl look at both."""
    rewards = plain.shaped_rewards(PLAIN | s, step)
    for k, reward in rewards.items():
        difference, others = plain.centered(step, rewards, k), {rewards[j] for j in plain.group_of(step, rewards, k)}
        assume(others == {reward} or (abs(difference) > 1e-9 and abs(reward - difference) > 1e-9))


@pytest.mark.parametrize("kind", KINDS)
@few(30)
@given(SEEDS, st.sampled_from(STYLES))
def test_every_advantage_is_as_stated(kind, seed, style):
    assert_as_stated({"advantage": KINDS[kind]}, random_step(seed, style=style))


@pytest.mark.parametrize("kind", KINDS)
@few(20)
@given(SEEDS, st.sampled_from(ESTIMATORS))
def test_a_kl_in_the_reward_is_taken_from_tokens_or_from_the_sample(kind, seed, estimator):
    s = {"advantage": KINDS[kind], "kl_coefficient": 0.2, "kl_estimator": estimator, "kl_in": "reward"}
    assert_as_stated(s, random_step(seed))


@pytest.mark.parametrize("kind", KINDS)
@few(20)
@given(SEEDS, st.sampled_from(OVERLONG), st.booleans(), st.sampled_from(STYLES))
def test_rewards_are_shaped_as_stated(kind, seed, overlong, whiten, style):
    s, drawn = {"advantage": KINDS[kind], "whiten_rewards": whiten, **overlong}, random_step(seed, style=style)
    assume_no_rounding(s, drawn[0])
    assert_as_stated(s, drawn)


@few(40)
@given(SEEDS, st.sampled_from(sorted(set(KINDS) - {"reinforce_pp_baseline"})), st.sampled_from(OVERLONG), st.booleans())
def test_shaping_and_a_kl_go_together_as_stated(seed, kind, overlong, whiten):
    s = {"advantage": KINDS[kind], "whiten_rewards": whiten, "kl_coefficient": 0.2, "kl_in": "reward", **overlong}
    assert_as_stated(s, random_step(seed))


@pytest.mark.parametrize(("x", "taken"), [(-30.0, 10.0), (-2.0, math.exp(2) - 3), (15.0, 10.0), (30.0, 10.0)])
@pytest.mark.parametrize("estimator", ["k3", "k3+", "unbiased"])
def test_k3_is_at_most_10(estimator, x, taken):
    assert plain.kl_value(estimator, x, 1.0) == pytest.approx(taken)
    drawn, logp = random_step(0)
    drawn.old, drawn.greedy = [[-1.0] * len(row) for row in drawn.mask], [0.0] * len(drawn.groups)
    drawn.ref = [[-1.0 - x] * len(row) for row in drawn.mask]
    s = {"advantage": {"kind": "remax"}, "kl_coefficient": 0.1, "kl_estimator": estimator, "kl_in": "reward"}
    assert_as_stated(s, (drawn, logp))


@pytest.mark.parametrize("kind", OF_GROUPS)
def test_groups_of_one_sample_have_advantage_0(kind):
    step, logp = random_step(3)
    step.groups = list(range(len(step.groups)))
    result = project({"advantage": KINDS[kind]}, step, logp)
    assert not result.advantages.any()
    assert result.loss == 0
    assert not result.gradient.any()


@pytest.mark.parametrize("kind", OF_GROUPS)
def test_a_sample_alone_in_its_group_has_advantage_0_whatever_the_others_have(kind):
    step, logp = random_step(5)
    step.groups = [7, *(k % 2 for k in range(1, len(step.groups)))]
    assert_as_stated({"advantage": KINDS[kind]}, (step, logp))
    advantages = project({"advantage": KINDS[kind]}, step, logp).advantages
    own = [i for i, k in enumerate(step.owner) if k == 0]
    assert not advantages[own].any() and advantages.any()


@pytest.mark.parametrize("sizes", [(3, 3, 3), (6, 7, 10), (11, 13, 16)])
@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "gpg", "maxrl", "opo"])
def test_equal_rewards_are_no_signal(sizes, kind):
    """Neither is a difference of rounding, which gpg would count among the samples whose advantage is not 0."""
    step, logp = random_step(1, sizes=sizes)
    step.rewards = [{0: 0.1, 1: 0.7}.get(g, float(k % 2)) for k, g in enumerate(step.groups)]
    assert_as_stated({"advantage": KINDS[kind]}, (step, logp))


@pytest.mark.parametrize("kind", sorted(set(OF_GROUPS) - {"prime"}))
@pytest.mark.parametrize("rewards", [[0.1, 0.2, 0.3], [0.1, 0.2, -0.3], [0.7, 0.8, 0.9]])
def test_the_order_of_samples_does_not_matter(kind, rewards):
    def advantages(rewards):
        step = plain.Columns(mask=[[True]] * 3, owner=[0, 1, 2], groups=[0] * 3, rewards=rewards, truncated=[False] * 3)
        step.old = step.ref = step.values = step.process = [[-1.0]] * 3
        return project({"advantage": KINDS[kind]}, step, step.old).advantages.ravel().tolist()

    assert advantages(rewards) == pytest.approx(advantages(rewards[::-1])[::-1], rel=1e-6, abs=1e-9)
    assert max(map(abs, advantages(rewards))) < 100


@pytest.mark.parametrize("kind", KINDS)
def test_padding_holes_and_nan_change_no_bit(kind):
    step, logp = random_step(5, style="ties")
    s = {"advantage": KINDS[kind], "kl_coefficient": 0.2, "kl_in": "reward"}
    with_nan = project(s, step, logp)
    for name in ("old", "ref", "values", "process"):
        setattr(step, name, [[0.3 if math.isnan(x) else x for x in row] for row in getattr(step, name)])
    without = project(s, step, [[-0.7 if math.isnan(x) else x for x in row] for row in logp])
    assert with_nan.advantages.tobytes() == without.advantages.tobytes()
    assert with_nan.gradient.tobytes() == without.gradient.tobytes()
    assert with_nan.loss == without.loss
    as_rectangle = project(s, step, logp, layout=padded).advantages
    assert [as_rectangle[i, t] for i, row in enumerate(step.mask) for t in range(len(row))] == with_nan.advantages.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_without_a_trained_token_has_no_loss(kind):
    step, logp = random_step(2)
    step.truncated = [True] * len(step.groups)
    result = project({"advantage": KINDS[kind], "overlong": "mask"}, step, logp)
    assert result.loss == 0
    assert not result.advantages.any()
    assert not result.kept.any()


@pytest.mark.parametrize("reward", [math.nan, math.inf])
@pytest.mark.parametrize("overlong", OVERLONG)
def test_a_reward_that_is_not_finite_is_refused_unless_nothing_of_it_is_trained_on(reward, overlong):
    step, logp = random_step(4)
    s, step.truncated[0] = {"advantage": KINDS["grpo"], **overlong}, True
    of_others = project(s, step, logp)
    step.rewards[0] = reward
    if overlong["overlong"] == "mask":
        assert project(s, step, logp).advantages.tolist() == of_others.advantages.tolist()
    else:
        with pytest.raises(ValueError, match="finite"):
            project(s, step, logp)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"maxrl"}))
def test_rows_of_padding_change_nothing_whatever_their_rewards_are(kind):
    """Groups of their own or of others, whitened or not."""
    tokens = {"mask": [[1, 1], [1, 0], [1, 1]], "logprobs": [[-1.0, -2.0], [-1.0, 0], [-0.5, -1.5]]}
    tokens |= dict.fromkeys(("reference_logprobs", "process_logprobs", "values"), tokens["logprobs"])
    given = {"rewards": [1.0, 0.0, 0.5], "groups": [0, 0, 0], "greedy_rewards": [0.2, 0.2, 0.2]}
    padded = {name: [*rows, [0, 0] if name == "mask" else [math.nan, math.inf]] for name, rows in tokens.items()}
    for whiten in (False, True) if kind != "remax" else (False,):
        algorithm = of_plain(PLAIN | {"advantage": KINDS[kind], "whiten_rewards": whiten})
        alone = algorithm_loss(algorithm, TokenArrays(**tokens), **given)
        for group, reward in ((0, math.nan), (7, math.inf), (7, 3.0)):
            more = {"rewards": [*given["rewards"], reward], "groups": [0, 0, 0, group], "greedy_rewards": [0.2, 0.2, 0.2, math.nan]}
            if math.isfinite(reward):
                more["greedy_rewards"][-1] = 9.0
            found = algorithm_loss(algorithm, TokenArrays(**padded), **more)
            assert found.advantages[:3].tolist() == alone.advantages.tolist()
            assert found.loss == alone.loss and not found.advantages[3].any()


# Models beside the policy: their losses, and gradients by differences


@pytest.mark.parametrize("overlong", ["none", "mask"])
@pytest.mark.parametrize("clip", [0.2, None])
@few(20)
@given(SEEDS)
def test_a_critic_s_loss_is_as_stated(clip, overlong, seed):
    step, _ = random_step(seed)
    s = {"advantage": KINDS["gae"], "overlong": overlong}
    new = [[x if math.isnan(x) else x + 0.3 * math.sin(7 * x) for x in row] for row in step.values]
    result = project(s, step, step.old, new_values=new, value_clip=clip)
    _, returns = plain.advantages(PLAIN | s, step)
    assert result.value_loss == pytest.approx(plain.value_loss(clip, new, step, returns), rel=1e-9, abs=1e-12)
    assert_is_slope(step, result.value_gradient, new, lambda moved: plain.value_loss(clip, moved, step, returns))


@few(20)
@given(SEEDS)
def test_the_loss_of_a_model_of_outcomes_is_as_stated(seed):
    step, _ = random_step(seed)
    s = {"advantage": KINDS["prime"], "overlong": "mask"}
    result = project(s, step, step.old, right_above=0.1)
    tokens = plain.advantages(PLAIN | s, step)[0]
    beta = of_plain(PLAIN | s).advantage.beta

    def loss(process):
        return plain.outcome_loss(beta, process, step, tokens, 0.1)

    assert result.outcome_loss == pytest.approx(loss(step.process), rel=1e-9, abs=1e-12)
    assert_is_slope(step, result.outcome_gradient, step.process, loss)


def assert_is_slope(step, gradient, column, loss, size=1e-6):
    """At some tokens; elsewhere 0."""
    places, found = [(i, t) for i, row in enumerate(step.mask) for t in range(len(row))], gradient.tolist()
    assert not any(slope for slope, (i, t) in zip(found, places, strict=True) if not step.mask[i][t])
    for place in range(0, len(places), 5):
        i, t = places[place]
        if not step.mask[i][t]:
            continue
        moved = [[list(row) for row in column] for _ in range(2)]
        moved[0][i][t] += size
        moved[1][i][t] -= size
        assert found[place] == pytest.approx((loss(moved[0]) - loss(moved[1])) / (2 * size), rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("advantage", [GroupAdvantage(kind="opo"), PassAtKAdvantage(kind="passk", by_std=True)])
def test_rewards_that_differ_by_rounding_alone_have_no_credit(advantage):
    step = ScoredStep(rewards_S=np.array([0.1 + 0.2, 0.3, 0.3]), group_S=np.zeros(3, dtype=np.int64), lengths_S=np.array([3, 2, 2]))
    np.testing.assert_array_equal(advantage_estimator(advantage)(step).advantages_S, 0.0)
