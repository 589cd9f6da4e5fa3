"""Objectives, corrections and the loss of a mini-batch, against their statements in plain Python; gradients by finite differences."""

import dataclasses
import math
import random
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

import plain_statements as plain

from moerl.algorithms.kl_formulas import adapted
from moerl.config.algorithm_settings import of_plain
from moerl.train.loss.algorithm_loss import TokenArrays, algorithm_loss

SEEDS = st.integers(0, 10**6)
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
    "clip_cov_dual": {"kind": "clip_cov", "share": 0.01, "clip_low": 0.2, "clip_high": None, "dual_clip": 1.2},
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
SOME_REJECTION = st.sampled_from(list(REJECTIONS.values()))
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
    """Without search for a smaller seed, which says no more."""
    return settings(derandomize=True, deadline=None, max_examples=count, phases=[Phase.generate])


class Case:
    """A mini-batch of six sequences with holes, one of them without a response token; `more`: columns that are not always given."""

    def __init__(self, seed, *, old=True, mu=True, outside=math.nan, spread=0.3):
        self.rng, self.outside = random.Random(seed), outside
        self.mask = [[self.rng.random() < 0.7 for _ in range(self.rng.randint(1, 6))] for _ in range(6)]
        self.mask[0], self.mask[1] = [False, False], [True, False, True]
        self.logp = self.column(lambda: -0.05 - self.rng.expovariate(1))
        self.old = self.beside(self.logp, spread) if old else None
        self.mu = self.beside(self.old or self.logp, spread) if mu else None
        self.ref, self.teacher = self.beside(self.logp, 0.6), self.beside(self.logp, 0.6)
        self.values, self.entropy = self.column(lambda: self.rng.gauss(0, 1)), self.column(lambda: self.rng.expovariate(1))
        self.more, self.version = {}, 0

    def column(self, draw):
        return [[draw() if inside else self.outside for inside in row] for row in self.mask]

    def beside(self, column, spread):
        return [[min(x + self.rng.gauss(0, spread), -0.01) if inside else self.outside for x, inside in zip(*rows, strict=True)]
                for rows in zip(column, self.mask, strict=True)]  # fmt: skip

    def weigh(self, name, choices, *, everywhere=False):
        self.more[name] = [[self.rng.choice(choices) if everywhere or inside else 0.0 for inside in row] for row in self.mask]

    def sample_versions(self):
        self.version, self.more["versions"] = 5, [[self.rng.randint(0, 5) for _ in row] for row in self.mask]

    def project(self, s):
        named = {"mask": self.mask, "logprobs": self.logp, "old_logprobs": self.old, "rollout_logprobs": self.mu}
        named |= {"reference_logprobs": self.ref, "values": self.values, "entropy": self.entropy, "teacher_logprobs": self.teacher}
        columns = {name: np.array([x for row in rows for x in row]) for name, rows in (named | self.more).items() if rows is not None}
        tokens = TokenArrays(lengths=[len(row) for row in self.mask], **columns)
        return algorithm_loss(
            of_plain(s), tokens, rewards=[0.0, 1.0, 0.0, 0.25, -1.0, 1.0], groups=[0, 0, 0, 1, 1, 1], version=self.version
        )

    def rows(self, flat):
        column = iter(flat.tolist())
        return [[next(column) for _ in row] for row in self.mask]

    def batch(self, result):
        return plain.Columns(
            mask=self.mask, advantages=self.rows(result.advantages), old=self.old, mu=self.mu, ref=self.ref, entropy=self.entropy,
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
    batch = case.batch(result)
    stated = plain.minibatch_loss(s, batch, case.logp, case.logp)
    assert result.loss == pytest.approx(stated, rel=1e-9, abs=1e-12)
    gradient = finite_differences(s, batch, case.logp)
    assert result.gradient.tolist() == pytest.approx(gradient, rel=1e-6, abs=1e-8 * max(1, abs(stated), *map(abs, gradient)))
    return result, batch, plain.terms_of(s, batch, case.logp, case.logp)


@pytest.mark.parametrize("name", OBJECTIVES)
@few(10)
@given(SEEDS, st.sampled_from(NORMALS), st.sampled_from([{}, {"advantage": {"kind": "grpo"}}]), st.booleans(), st.booleans())
def test_every_objective_is_as_stated(name, seed, normal, advantage, old, mu):
    assert_as_stated({"objective": OBJECTIVES[name], **normal, **advantage}, Case(seed, old=old, mu=mu))


@pytest.mark.parametrize("name", OBJECTIVES)
@few(4)
@given(SEEDS, st.lists(st.sampled_from(list(CORRECTIONS.values())), max_size=1))
def test_exponents_are_clamped_as_stated(name, seed, corrections):
    assert_as_stated({"objective": OBJECTIVES[name], "corrections": corrections}, Case(seed, spread=30.0))


@few(4)
@given(SEEDS)
def test_a_drift_penalty_is_no_exponent(seed):
    assert_as_stated({"objective": OBJECTIVES["ipo"], "drift_penalty": 0.1}, Case(seed, spread=30.0))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_token_of_probability_1_has_a_finite_loss(name):
    case = Case(7)
    case.logp[1], case.mu[2] = [0.0] * len(case.logp[1]), [0.0] * len(case.mu[2])
    assert math.isfinite(assert_as_stated({"objective": OBJECTIVES[name]}, case)[0].loss)


@few(20)
@given(SEEDS, st.sampled_from([1.7, 1.05, 0.3]))
def test_temperatures_of_sapo_have_all_their_digits(seed, tau):
    assert_as_stated({"objective": {"kind": "sapo", "tau_positive": tau, "tau_negative": tau / 3}}, Case(seed))


@pytest.mark.parametrize("name", CORRECTIONS)
@few(10)
@given(SEEDS, st.sampled_from(sorted(OBJECTIVES)), st.booleans())
def test_every_correction_is_as_stated(name, seed, objective, old):
    s = {"objective": OBJECTIVES[objective], "corrections": [CORRECTIONS[name]], "kl_coefficient": 0.2, "drift_penalty": 0.1}
    assert_as_stated(s, Case(seed, old=old))


@pytest.mark.parametrize("name", REJECTIONS)
@few(6)
@given(SEEDS, st.sampled_from(sorted(OBJECTIVES)), st.booleans(), st.sampled_from(NORMALS))
def test_every_rejection_is_as_stated(name, seed, objective, old, normal):
    s = {"objective": OBJECTIVES[objective], "corrections": [REJECTIONS[name]], "kl_coefficient": 0.2, **normal}
    case = Case(seed, old=old)
    result, _, (left, _) = assert_as_stated(s, case)
    assert case.rows(result.kept) == [[(i, t) in left.tokens for t in range(len(row))] for i, row in enumerate(case.mask)]


@few(25)
@given(SEEDS, st.lists(SOME_REJECTION, max_size=2), st.lists(st.sampled_from([*CORRECTIONS.values()]), max_size=2), st.booleans())
def test_weights_of_several_corrections_are_multiplied(seed, rejections, corrections, old):
    assert_as_stated({"corrections": rejections + corrections}, Case(seed, old=old))


@few(10)
@given(SEEDS, SOME_REJECTION, st.sampled_from(["tis_normalized", "tis_sequence_normalized"]))
def test_normalized_weights_have_mean_1_over_what_a_later_rejection_leaves(seed, rejection, name):
    assert_as_stated({"corrections": [CORRECTIONS[name], rejection]}, Case(seed))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@few(8)
@given(SEEDS, st.sampled_from(sorted(OBJECTIVES)), st.sampled_from(NORMALS), st.booleans())
def test_a_kl_in_the_loss_is_as_stated(estimator, seed, objective, normal, old):
    s = {"objective": OBJECTIVES[objective], "kl_coefficient": 0.3, "kl_estimator": estimator, **normal}
    assert_as_stated(s, Case(seed, old=old))


@few(20)
@given(SEEDS, st.sampled_from(sorted(OBJECTIVES)), st.booleans(), st.sampled_from(NORMALS))
def test_drift_and_entropy_are_as_stated(seed, objective, old, normal):
    s = {"objective": OBJECTIVES[objective], "drift_penalty": 0.3, "entropy_bonus": 0.2, **normal}
    assert_as_stated(s, Case(seed, old=old))


@few(20)
@given(SEEDS, st.sets(st.sampled_from(["rl_weights", "ce_weights", "kl_weights"]), min_size=1), st.booleans(), st.sampled_from(NORMALS))
def test_streams_are_added_as_stated(seed, streams, everywhere, normal):
    case = Case(seed, outside=-0.8 if everywhere else math.nan, old=seed % 2 == 0)
    for name in sorted(streams):
        case.weigh(name, [0.5, 1.0, 2.0] if name == "rl_weights" else [0.0, 0.5, 2.0], everywhere=everywhere)
        case.more[name][1][0] = 1.0
    assert_as_stated({"kl_coefficient": 0.3, **normal}, case)


@pytest.mark.parametrize("normal", NORMALS)
@few(10)
@given(SEEDS, st.sampled_from(sorted(OBJECTIVES)), st.lists(st.sampled_from([*CORRECTIONS.values(), *REJECTIONS.values()]), max_size=1))
def test_tokens_of_rl_weight_0_are_as_if_outside_the_mask(normal, seed, objective, corrections):
    case = Case(seed)
    case.weigh("rl_weights", [0.0, 1.0, 2.0])
    result, *_ = assert_as_stated({"objective": OBJECTIVES[objective], "corrections": corrections, "kl_coefficient": 0.2, **normal}, case)
    weighted = np.array([x != 0 for row in case.more["rl_weights"] for x in row])
    assert not result.gradient[~weighted].any()


@few(25)
@given(SEEDS, st.sampled_from(sorted(OBJECTIVES)), st.lists(st.sampled_from([*CORRECTIONS.values()]), max_size=1), st.booleans())
def test_a_log_linear_old_policy_is_as_stated(seed, objective, corrections, old):
    case = Case(seed, old=old)
    case.sample_versions()
    s = {"objective": OBJECTIVES[objective], "corrections": corrections, "kl_coefficient": 0.2, "kl_estimator": "unbiased"}
    assert_as_stated(s | {"drift_penalty": 0.1}, case)


@few(10)
@given(SEEDS, SOME_REJECTION, st.booleans())
def test_a_rejection_by_a_log_linear_old_policy_is_as_stated(seed, rejection, old):
    case = Case(seed, old=old)
    case.sample_versions()
    assert_as_stated({"corrections": [rejection]}, case)


def mismatch(tokens, trainer, server):
    """Of the tokens that servers sampled; d is trainer minus server."""
    x, y = [trainer[i][t] for i, t in tokens], [server[i][t] for i, t in tokens]
    d, mean_x, mean_y = [a - b for a, b in zip(x, y, strict=True)], plain.mean(x), plain.mean(y)
    mean_rho, deviation = plain.mean(map(plain.exp, d)), math.sqrt(plain.unbiased_variance(x) * plain.unbiased_variance(y)) * (len(x) - 1)
    return {
        "mean": plain.mean(map(abs, d)),
        "max": max(map(abs, d)),
        "k1": plain.mean(-each for each in d),
        "k3": plain.mean(plain.exp(each) - each - 1 for each in d),
        "chi2": plain.mean(plain.exp(each) ** 2 for each in d) - 1,
        "effective": 1 / plain.mean((plain.exp(each) / mean_rho) ** 2 for each in d),
        "trainer_perplexity": math.exp(-mean_x),
        "server_perplexity": math.exp(-mean_y),
        "correlation": sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / deviation if deviation else 1.0,
    }


def is_beyond(A, r, o):
    """The ratio's clip alone."""
    return plain.ppo_clip(A, r, o | {"dual_clip": None}) != -A * r


def is_clipped(o, x, k, chosen):
    """Whether a clip, a choice or a region gives the token another loss than without it."""
    A, d, r = x.A[k], x.d[k], plain.exp(x.d[k])
    kinds = {
        "ppo_clip": lambda: is_beyond(A, r, o),
        "gspo_token": lambda: is_beyond(A, plain.sequence_ratio(x, k), o),
        "gspo": lambda: is_beyond(plain.mean(x.sequence(x.A, k)), plain.sequence_ratio(x, k), o),
        "cispo": lambda: plain.clip(r, o) != r,
        "gmpo": lambda: plain.clipped_d(A, d, o) != d,
        "clip_cov": lambda: k in chosen or is_beyond(A, r, o),
        "m2po": lambda: k in chosen,
    }
    regions = dict.fromkeys(("dppo_tv", "dppo_kl", "dppo_tv_prime", "ipo"), lambda: not plain.is_inside(o, x, k))
    return (kinds | regions).get(o["kind"], lambda: False)()


def is_bounded(c, x, k):
    """Whether a correction's cap or bounds give the token another weight than without them."""
    unbounded = c | {"normalized": False} | {"cap": math.inf} if c["kind"] == "tis" else c | {"low": 0.0, "high": math.inf}
    if c["kind"] == "opsm":
        return plain.weight(c, x, k) == 0
    return plain.weight(c, x, k) != plain.weight(unbounded, x, k)


@few(15)
@given(SEEDS, st.booleans(), st.booleans(), st.booleans())
def test_mismatch_is_told_of_all_tokens_that_servers_sampled(seed, old, mu, rejects):
    case = Case(seed, old=old, mu=mu)
    metrics = case.project(PLAIN | {"corrections": [REJECTIONS["k1_token"]] * rejects}).metrics
    trainer = case.old or case.logp  # rho is of the policy before the update
    stated = mismatch(plain.response_tokens(case.mask), trainer, case.mu or trainer)
    told = dataclasses.asdict(metrics["mismatch"]) | {name: metrics[f"mismatch_{name}"] for name in ("mean", "max")}
    assert told | {"k3": metrics["mismatch_kl"]} == pytest.approx(stated, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", OBJECTIVES)
@few(4)
@given(SEEDS, st.booleans(), st.booleans())
def test_clips_and_the_kl_from_the_old_policy_are_told(name, seed, old, rejects):
    case, o = Case(seed, old=old), OBJECTIVES[name]
    result, _, (x, _) = assert_as_stated({"objective": o, "corrections": [REJECTIONS["k1_token"]] * rejects}, case)
    chosen, told = plain.chosen_tokens(o, x), result.metrics
    assert told["kl_old"] == pytest.approx(plain.mean(plain.kl_value("k3", -d, 1) for d in x.d.values()), rel=1e-9, abs=1e-14)
    assert told["kl_old_k1"] == pytest.approx(plain.mean(-d for d in x.d.values()), rel=1e-9, abs=1e-14)
    assert told["clip_fraction"] == pytest.approx(plain.mean(float(is_clipped(o, x, k, chosen)) for k in x.tokens))
    if o["kind"] in ("clip_cov", "kl_cov", "m2po"):
        assert told["objective"]["selected"] == pytest.approx(plain.mean(float(k in chosen) for k in x.tokens))


@pytest.mark.parametrize("name", ["ppo_clip_dual", "gspo_dual", "clip_cov_dual"])
@few(6)
@given(SEEDS)
def test_a_dual_clip_is_told_apart(name, seed):
    case, o = Case(seed), OBJECTIVES[name]
    result, _, (x, _) = assert_as_stated({"objective": o}, case)
    chosen, without = plain.chosen_tokens(o, x), o | {"dual_clip": None}
    bounded = [plain.objective(o, x, k, chosen) != plain.objective(without, x, k, chosen) for k in x.tokens]
    assert result.metrics["objective"].get("dual_clipped") == pytest.approx(plain.mean(map(float, bounded)))
    alone = case.project(PLAIN | {"objective": without}).metrics["clip_fraction"]
    assert result.metrics["clip_fraction"] == pytest.approx(alone)


@few(25)
@given(SEEDS, st.lists(SOME_REJECTION, max_size=1), st.lists(st.sampled_from([*CORRECTIONS.values()]), max_size=2))
def test_what_corrections_did_is_told(seed, rejections, corrections):
    """Shares of all response tokens; the mean weight is of those that are left."""
    case = Case(seed)
    result, _, (x, before) = assert_as_stated({"corrections": rejections + corrections}, case)
    every = len(plain.response_tokens(case.mask))
    factors = [plain.weights(c, x, before) for c in corrections]
    bounded = [k for k in x.tokens if any(is_bounded(c, x, k) for c in corrections)]
    if x.tokens:
        mean_weight = plain.mean(math.prod(f[k] for f in factors) for k in x.tokens)
        assert result.metrics["correction_weight"] == pytest.approx(mean_weight)
    assert result.metrics["correction_dropped"] == pytest.approx((every - len(x.tokens)) / every)
    assert result.metrics["correction_bounded"] == pytest.approx((every - len(x.tokens) + len(bounded)) / every)


@few(25)
@given(
    SEEDS,
    st.sampled_from(sorted(OBJECTIVES)),
    st.lists(st.sampled_from([*CORRECTIONS.values(), *REJECTIONS.values()]), max_size=2),
    st.booleans(),
)
def test_nan_outside_the_mask_changes_no_bit(seed, objective, corrections, old):
    s = {"objective": OBJECTIVES[objective], "corrections": corrections, "kl_coefficient": 0.3, "drift_penalty": 0.1, "entropy_bonus": 0.2}
    results = []
    for outside in (math.nan, -0.7):
        case = Case(seed, old=old, outside=outside)
        for name in ("rl_weights", "ce_weights", "kl_weights"):
            case.weigh(name, [0.5, 1.0])
        case.more["rl_weights"] = case.column(lambda: 0.5)
        results.append(case.project(PLAIN | s))
    with_nan, without = results
    assert with_nan.gradient.tobytes() == without.gradient.tobytes()
    assert with_nan.advantages.tobytes() == without.advantages.tobytes()
    assert (with_nan.loss, with_nan.metrics) == (without.loss, without.metrics)
    assert math.isfinite(with_nan.loss)


@few(20)
@given(st.floats(0, 1), st.floats(0.001, 1), st.integers(1, 10_000), st.integers(1, 10_000))
def test_an_adaptive_coefficient_steers_as_stated(kl, target, horizon, n):
    stated = 0.1 * (1 + plain.clamp(kl / target - 1, -0.2, 0.2) * n / horizon)
    assert adapted(0.1, kl=kl, target=target, horizon=horizon, num_samples=n) == pytest.approx(stated)
