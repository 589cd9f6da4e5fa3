"""Advantages and what comes before them, against their statements in plain Python."""

import random
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

import plain_statements as plain

from moerl.config.algorithm_settings import of_plain
from moerl.train.loss.plain_loss import TokenArrays, algorithm_loss

FEW = settings(derandomize=True, deadline=None, max_examples=25)
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
ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k3+", "abs+", "unbiased")
PLAIN = {
    "objective": {"kind": "reinforce"},
    "normalize_by": "token",
    "kl_coefficient": 0.0,
    "kl_estimator": "k3",
    "kl_in": "loss",
    "whiten_rewards": False,
    "overlong": "none",
}


def rewards_like(rng, style, count):
    """Eighths, whose sums are exact: what equals a group's mean does so in any order of the sum."""
    if style == "equal":
        return [0.1] * count
    if style == "ties":
        return [rng.choice([0.0, 1.0]) for _ in range(count)]
    if style == "balanced":
        return [rng.choice([-1.0, 1.0]) for _ in range(count)]
    return [rng.randint(-16, 16) / 8 for _ in range(count)]


def random_step(rng, *, style="any", empty=True, single=True):
    """Groups of 1 to 4 samples, out of order; samples of 1 to 3 sequences; sequences of 1 to 7 tokens with holes."""
    sizes = [1, 2, 3, 4] if single else [2, 3, 4]
    groups = [g for g, size in enumerate(rng.sample(sizes, 3)) for _ in range(size)]
    rng.shuffle(groups)
    owner = [k for k in range(len(groups)) for _ in range(rng.randint(1, 3))]
    mask = [[rng.random() < 0.6 for _ in range(rng.randint(1, 7))] for _ in owner]
    for k in range(len(groups)):
        first = owner.index(k)
        mask[first][0] = True
    if empty:
        without = rng.randrange(len(groups))
        mask = [[False] * len(row) if owner[i] == without else row for i, row in enumerate(mask)]

    def column():
        return [[-rng.expovariate(1) if inside else float("nan") for inside in row] for row in mask]

    return plain.Step(
        mask=mask,
        owner=owner,
        rewards=rewards_like(rng, style, len(groups)),
        groups=groups,
        truncated=[rng.random() < 0.3 for _ in groups],
        max_response_tokens=8,
        greedy=[rng.uniform(-1, 1) for _ in groups],
        old=column(),
        ref=column(),
        values=column(),
        process=column(),
    )


def flat(rows):
    return np.array([x for row in rows for x in row])


def project(s, step, **changed):
    """Result of the project, and its numbers by token."""
    names = {"old_logprobs": step.old, "logprobs": step.old, "reference_logprobs": step.ref}
    names |= {"values": step.values, "process_logprobs": step.process}
    columns = {name: flat(rows) for name, rows in names.items()}
    return algorithm_loss(
        of_plain(s),
        TokenArrays(**{"mask": flat(step.mask), "lengths": [len(row) for row in step.mask]} | columns | changed),
        rewards=step.rewards,
        groups=step.groups,
        samples=step.owner,
        greedy_rewards=step.greedy,
        truncated=step.truncated,
        max_response_tokens=step.max_response_tokens,
    )


def by_token(step, column):
    places = [(i, t) for i, row in enumerate(step.mask) for t in range(len(row))]
    return dict(zip(places, column.tolist(), strict=True))


def assert_equal(step, column, expected):
    """Tokens without an expected number have 0."""
    told = by_token(step, column)
    assert told == pytest.approx({token: expected.get(token, 0.0) for token in told}, rel=1e-9, abs=1e-10)


def assert_as_stated(s, step):
    s = PLAIN | s
    result, (advantages, returns) = project(s, step), plain.advantages(s, step)
    assert_equal(step, result.advantages, advantages)
    assert (result.returns is None) == (returns is None)
    if returns is not None:
        assert_equal(step, result.returns, returns)


@pytest.mark.parametrize("kind", KINDS)
@FEW
@given(SEEDS, st.sampled_from(["any", "ties", "balanced", "equal"]))
def test_advantages_of_every_kind_are_as_stated(kind, seed, style):
    rng = random.Random(seed)
    assert_as_stated({"advantage": KINDS[kind]}, random_step(rng, style=style, empty=rng.random() < 0.5))


@pytest.mark.parametrize("kind", KINDS)
@settings(derandomize=True, deadline=None, max_examples=12)
@given(SEEDS, st.sampled_from(ESTIMATORS))
def test_a_kl_in_the_reward_is_taken_from_tokens_or_from_the_sample(kind, seed, estimator):
    s = {"advantage": KINDS[kind], "kl_coefficient": 0.2, "kl_estimator": estimator, "kl_in": "reward"}
    assert_as_stated(s, random_step(random.Random(seed)))


@pytest.mark.parametrize("kind", KINDS)
@settings(derandomize=True, deadline=None, max_examples=12)
@given(SEEDS, st.sampled_from([{"overlong": "penalty", "overlong_buffer": 3}, {"overlong": "mask"}, {"overlong": "none"}]), st.booleans())
def test_rewards_are_shaped_as_stated(kind, seed, overlong, whiten):
    assert_as_stated({"advantage": KINDS[kind], "whiten_rewards": whiten, **overlong}, random_step(random.Random(seed), style="any"))
