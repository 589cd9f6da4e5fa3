"""Objectives, corrections and the loss of a mini-batch, against their statements in plain Python; gradients by finite differences."""

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

SEEDS = st.integers(0, 10**6)
NAN = float("nan")
UNBOUNDED = {"clip_low": None, "clip_high": None}
OBJECTIVES = {
    "ppo_clip": {"kind": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": None},
    "ppo_clip_dual": {"kind": "ppo_clip", "clip_low": None, "clip_high": 0.2, "dual_clip": 1.3},
    "ppo_clip_unbounded": {"kind": "ppo_clip", **UNBOUNDED, "dual_clip": None},
    "gspo_token": {"kind": "gspo_token", "clip_low": 0.1, "clip_high": 0.1, "dual_clip": None},
    "gspo": {"kind": "gspo", "clip_low": 0.1, "clip_high": 0.05, "dual_clip": None},
    "gspo_dual": {"kind": "gspo", **UNBOUNDED, "dual_clip": 1.1},
    "cispo": {"kind": "cispo", "clip_low": 0.1, "clip_high": 0.3},
    "cispo_unbounded": {"kind": "cispo", **UNBOUNDED},
    "sapo": {"kind": "sapo", "tau_positive": 1.0, "tau_negative": 1.75},
    "gmpo": {"kind": "gmpo", "clip_low": 0.2, "clip_high": 0.3},
    "gmpo_unbounded": {"kind": "gmpo", **UNBOUNDED},
    "clip_cov": {"kind": "clip_cov", "share": 0.3, "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
    "clip_cov_one": {"kind": "clip_cov", "share": 0.01, "clip_low": 0.2, "clip_high": None, "dual_clip": 1.2},
    "kl_cov": {"kind": "kl_cov", "share": 0.3, "coefficient": 0.7},
    "m2po": {"kind": "m2po", "tau": 0.04},
    "m2po_all": {"kind": "m2po", "tau": 1e-9},
    "dppo_tv": {"kind": "dppo_tv", "low": 0.05, "high": 0.03, "ratio_cap": 1.2},
    "dppo_kl": {"kind": "dppo_kl", "low": 0.01, "high": 0.02, "ratio_cap": 1.2},
    "dppo_tv_prime": {"kind": "dppo_tv_prime", "low": 0.05, "high": 0.03, "drift_penalty": 0.4},
    "ipo": {"kind": "ipo", "divergence": 0.04},
    "reinforce": {"kind": "reinforce"},
}
TIS = {"kind": "tis", "level": "token", "cap": 1.2, "normalized": False}
CORRECTIONS = {
    "tis": TIS,
    "tis_normalized": TIS | {"normalized": True},
    "tis_sequence": TIS | {"level": "sequence"},
    "tis_sequence_normalized": TIS | {"level": "sequence", "normalized": True},
    "icepop": {"kind": "icepop", "low": 0.8, "high": 1.3},
    "opsm": {"kind": "opsm", "delta": 0.05},
    "sequence_mask_tis": {"kind": "sequence_mask_tis", "low": 0.9, "high": 1.2},
}
BOUNDS = {"k1": (0.7, 1.3), "k2": (None, 0.05), "k3": (0.001, 0.05)}
REJECTIONS = {
    f"{statistic}_{level}": {"kind": "rejection", "statistic": statistic, "level": level, "low": low, "high": high}
    for statistic, (low, high) in BOUNDS.items()
    for level in ("token", "sum", "mean", "max")
}
ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k3+", "abs+", "unbiased")
NORMALS = [{"normalize_by": name} for name in ("token", "sequence", "sequence_sum")] + [{"normalize_by": "fixed_length", "fixed_length": 9}]
PLAIN = {
    "advantage": {"kind": "gae", "gamma": 0.8, "lam": 0.7},
    "objective": OBJECTIVES["ppo_clip"],
    "corrections": [],
    "normalize_by": "sequence",
    "kl_coefficient": 0.0,
    "kl_estimator": "k3",
    "kl_in": "loss",
    "drift_penalty": 0.0,
    "entropy_bonus": 0.0,
}


def few(count):
    return settings(derandomize=True, deadline=None, max_examples=count)


class Case:
    """A mini-batch of six sequences with holes, one of them without a response token, and what the project takes of it."""

    def __init__(self, seed, *, old=True, mu=True):
        self.rng = random.Random(seed)
        self.mask = [[self.rng.random() < 0.7 for _ in range(self.rng.randint(1, 6))] for _ in range(6)]
        self.mask[0], self.mask[1][0] = [False] * len(self.mask[0]), True
        self.logp = self.column(lambda: -0.05 - self.rng.expovariate(1))
        self.old = self.beside(self.logp) if old else None
        self.mu = self.beside(self.old or self.logp) if mu else None
        self.ref, self.teacher = self.beside(self.logp, 0.6), self.beside(self.logp, 0.6)
        self.values, self.entropy = self.column(lambda: self.rng.gauss(0, 1)), self.column(lambda: self.rng.expovariate(1))
        self.more, self.version = {}, 0

    def column(self, draw):
        return [[draw() if inside else NAN for inside in row] for row in self.mask]

    def beside(self, column, spread=0.3):
        return [[min(x + self.rng.gauss(0, spread), -0.01) for x in row] for row in column]

    def columns(self):
        named = {"mask": self.mask, "logprobs": self.logp, "old_logprobs": self.old, "rollout_logprobs": self.mu}
        named |= {"reference_logprobs": self.ref, "values": self.values, "entropy": self.entropy, "teacher_logprobs": self.teacher}
        return {name: np.array(sum(rows, [])) for name, rows in (named | self.more).items() if rows is not None}

    def project(self, s, **changed):
        tokens = TokenArrays(lengths=[len(row) for row in self.mask], **self.columns() | changed)
        rewards = [0.0, 1.0, 0.0, 0.25, -1.0, 1.0]
        return algorithm_loss(of_plain(s), tokens, rewards=rewards, groups=[0, 0, 0, 1, 1, 1], version=self.version)

    def rows(self, flat):
        column = iter(flat.tolist())
        return [[next(column) for _ in row] for row in self.mask]

    def batch(self, advantages):
        return plain.Batch(
            mask=self.mask, advantages=self.rows(advantages), old=self.old, mu=self.mu, ref=self.ref, entropy=self.entropy,
            teacher=self.teacher, version=self.version, **self.more,
        )  # fmt: skip


def finite_differences(s, batch, logp):
    """Of the statement, for each log-prob; `sg` stays where it is."""
    h, gradient = 1e-6, []
    for i, row in enumerate(logp):
        for t in range(len(row)):
            either = [[[x + h * sign * ((j, u) == (i, t)) for u, x in enumerate(r)] for j, r in enumerate(logp)] for sign in (1, -1)]
            above, below = (plain.minibatch_loss(s, batch, moved, logp) for moved in either)
            gradient.append((above - below) / (2 * h))
    return gradient


def assert_as_stated(s, case):
    s = PLAIN | s
    result = case.project(s)
    batch = case.batch(result.advantages)
    assert result.loss == pytest.approx(plain.minibatch_loss(s, batch, case.logp, case.logp), rel=1e-9, abs=1e-12)
    assert result.gradient.tolist() == pytest.approx(finite_differences(s, batch, case.logp), rel=1e-6, abs=1e-8)
    return s, result, batch


def normals_of(objective):
    return NORMALS[1] if objective["kind"] == "gmpo" else None


@pytest.mark.parametrize("name", OBJECTIVES)
@few(12)
@given(SEEDS, st.sampled_from(NORMALS), st.sampled_from([{}, {"advantage": {"kind": "grpo"}}]), st.booleans(), st.booleans())
def test_every_objective_is_as_stated(name, seed, normal, advantage, old, mu):
    objective = OBJECTIVES[name]
    assert_as_stated({"objective": objective} | (normals_of(objective) or normal) | advantage, Case(seed, old=old, mu=mu))


@pytest.mark.parametrize("name", CORRECTIONS)
@few(12)
@given(SEEDS, st.sampled_from(sorted(set(OBJECTIVES) - {"gmpo", "gmpo_unbounded", "dppo_tv_prime"})), st.booleans())
def test_every_correction_is_as_stated(name, seed, objective, old):
    s = {"objective": OBJECTIVES[objective], "corrections": [CORRECTIONS[name]], "kl_coefficient": 0.2, "drift_penalty": 0.1}
    assert_as_stated(s, Case(seed, old=old))


@pytest.mark.parametrize("name", REJECTIONS)
@few(8)
@given(SEEDS, st.sampled_from(sorted(set(OBJECTIVES) - {"gmpo", "gmpo_unbounded"})), st.booleans(), st.sampled_from(NORMALS))
def test_every_rejection_is_as_stated(name, seed, objective, old, normal):
    s = {"objective": OBJECTIVES[objective], "corrections": [REJECTIONS[name]], "kl_coefficient": 0.2, **normal}
    case = Case(seed, old=old)
    s, result, batch = assert_as_stated(s, case)
    kept = set(plain.terms_of(s, batch, case.logp, case.logp)[0].tokens)
    assert case.rows(result.kept) == [[(i, t) in kept for t in range(len(row))] for i, row in enumerate(case.mask)]


@few(30)
@given(SEEDS, st.lists(st.sampled_from([*CORRECTIONS.values(), *REJECTIONS.values()]), min_size=2, max_size=3), st.booleans())
def test_weights_of_several_corrections_are_multiplied(seed, corrections, old):
    assert_as_stated({"corrections": corrections}, Case(seed, old=old))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@few(8)
@given(SEEDS, st.sampled_from(sorted(set(OBJECTIVES) - {"gmpo", "gmpo_unbounded"})), st.sampled_from(NORMALS), st.booleans())
def test_a_kl_in_the_loss_is_as_stated(estimator, seed, objective, normal, old):
    s = {"objective": OBJECTIVES[objective], "kl_coefficient": 0.3, "kl_estimator": estimator, **normal}
    assert_as_stated(s, Case(seed, old=old))


@few(20)
@given(SEEDS, st.sampled_from(sorted(OBJECTIVES)), st.booleans())
def test_drift_and_entropy_are_as_stated(seed, objective, old):
    s = {"objective": OBJECTIVES[objective], "drift_penalty": 0.3, "entropy_bonus": 0.2}
    assert_as_stated(s, Case(seed, old=old))
