"""The invariants listed in moerl/train/loss/batch_loss.py, against loops over the unpacked batch."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.algorithms.columns import TokenLoss
from moerl.algorithms.mini_batch_loss import SUPERVISED, Loss, ValueLossSettings, loss_of
from moerl.config.algorithm_settings import algorithm, of_plain
from moerl.train.batching.micro_batch_plan import MicroBatchPlanner
from moerl.train.batching.packed_sequences import pack
from moerl.train.loss.batch_loss import Denominators, LossColumns, micro_batch_loss
from moerl.train.loss.loss_sums import SUMMED, LossSums, step_statistics
from moerl.types.batch import TrainBatch

CONFIGS = {
    "grpo": algorithm("grpo"),
    "grpo_token_kl": algorithm("grpo", "normalize_by=token", "kl_coefficient=0.3", "objective.dual_clip=3.0"),
    "grpo_sequence_kl": algorithm("grpo", "kl_coefficient=0.1"),
    "dapo": algorithm("dapo", "overlong=none", "objective.dual_clip=2.0"),
}
LOSSES = {name: loss_of(config) for name, config in CONFIGS.items()} | {"sft": SUPERVISED}
"""Held against loops over the unpacked batch."""


def kinds():
    """(name, loss) of every objective and live correction, with every aggregation and every KL."""
    objectives = [
        "ppo_clip", "gspo", "gspo_token", "cispo", "sapo", "gmpo", "dppo_tv", "dppo_kl", "dppo_tv_prime", "ipo", "reinforce",
    ]  # fmt: skip
    for kind in objectives:
        yield kind, {"objective": {"kind": kind}, "kl_coefficient": 0.2, "kl_estimator": "unbiased", "drift_penalty": 0.1}
    corrections = [
        {"kind": "tis"}, {"kind": "tis", "level": "sequence"}, {"kind": "icepop"}, {"kind": "opsm"},
        {"kind": "sequence_mask_tis", "low": 0.5},
    ]  # fmt: skip
    for index, correction in enumerate(corrections):
        yield f"correction {index}", {"objective": {"kind": "ppo_clip"}, "corrections": [correction], "normalize_by": "sequence_sum"}
    for estimator in ("k1", "k2", "abs", "k1+", "k3+", "abs+"):
        yield f"kl {estimator}", {"objective": {"kind": "ppo_clip"}, "kl_coefficient": 0.2, "kl_estimator": estimator}
    yield "entropy", {"objective": {"kind": "ppo_clip"}, "entropy_bonus": 0.3, "normalize_by": "fixed_length", "fixed_length": 7}


ALL = LOSSES | {name: loss_of(of_plain({"advantage": {"kind": "grpo"}, **plain})) for name, plain in kinds()}

SETTINGS = settings(derandomize=True, deadline=None, max_examples=40)
OVER_SEQUENCES = ("gspo", "gspo_token", "gmpo", "correction 1", "correction 3", "correction 4")
CASES = given(st.integers(0, 10**6), st.sampled_from(sorted(LOSSES)), st.booleans())
ALL_CASES = given(st.integers(0, 10**6), st.sampled_from(sorted(ALL)), st.booleans())


class Policy:
    """A log-prob and an entropy for every token of a batch: the stand-in for a model's output, with a gradient per token."""

    def __init__(self, rng, num_tokens, *, poison=None):
        self.logprobs = -rng.exponential(1, num_tokens)
        self.entropies = rng.exponential(1, num_tokens)
        self.poison = poison

    def leaf(self):
        return torch.tensor(self.logprobs, dtype=torch.float32, requires_grad=True)

    def at_labels(self, leaf, packed):
        """Values at label positions; positions without a label get what a model might compute there: anything."""
        index = torch.from_numpy(packed.label_index_T)
        fill = -3.0 if self.poison is None else self.poison
        pick = index.clamp(min=0)
        entropies = torch.tensor(self.entropies, dtype=torch.float32)
        return torch.where(index >= 0, leaf[pick], fill), torch.where(index >= 0, entropies[pick], fill)


def make_batch(rng, num_sequences=6, *, with_old=True):
    lengths = rng.integers(2, 12, num_sequences)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    mask = rng.random(offsets[-1]) < 0.6  # holes stand for tool output
    mask[offsets[:-1]] = False
    mask[offsets[0] : offsets[1]] = False  # one sequence without a response token
    mask[offsets[1] + 1] = True
    advantages = np.repeat(rng.normal(size=num_sequences), lengths).astype(np.float32)

    def logprobs():
        return -rng.exponential(1, offsets[-1]).astype(np.float32)

    return TrainBatch(
        token_ids_T=rng.integers(1, 50, offsets[-1]),
        response_mask_T=mask,
        rollout_logprobs_T=logprobs(),
        advantages_T=advantages,
        offsets=offsets,
        old_logprobs_T=logprobs() if with_old else None,
        reference_logprobs_T=logprobs(),
        ce_weight_T=np.where(mask, 1, 0).astype(np.float32),
        server_T=np.where(mask, rng.integers(-1, 3, offsets[-1]), -1).astype(np.int16),
    )


def counts(batch):
    return replace(Denominators.of(batch), num_ce=int(batch.response_mask_T.sum()))


def fitting(batch, loss):
    return batch if loss.objective is None else replace(batch, ce_weight_T=None)


def poisoned(batch, value):
    outside = ~batch.response_mask_T
    names = ("rollout_logprobs_T", "advantages_T", "old_logprobs_T", "reference_logprobs_T")
    columns = {name: np.where(outside, np.float32(value), getattr(batch, name)) for name in names if getattr(batch, name) is not None}
    return replace(batch, **columns)


def run(batch, policy, loss_of_tokens, micro_batches, *, token_multiple=1, cp=1):
    """Loss, gradient per token and sums, over the given micro-batches, each cut into the parts of `cp` ranks."""
    batch = fitting(batch, loss_of_tokens)
    leaf, sums, total = policy.leaf(), LossSums.zero("cpu", batch.num_servers, loss_of_tokens.metric_names), 0.0
    for members in micro_batches:
        packed = pack(batch, members, token_multiple, 2 * cp if cp > 1 else 1)
        for part in range(cp):
            mine = packed.part_of(part, cp)
            logp, entropy = policy.at_labels(leaf, mine)
            columns = LossColumns.of(mine, device="cpu")
            loss, part_sums = micro_batch_loss(logp, entropy, columns, loss_of_tokens, counts(batch))
            loss.backward(retain_graph=True)
            total, sums = total + loss.item(), sums + part_sums
    return total, leaf.grad.numpy(), sums


def reference(batch, policy, name):
    """Loss and gradient in float64, as nested loops over sequences and their response tokens."""
    leaf = torch.tensor(policy.logprobs.astype(np.float32), dtype=torch.float64, requires_grad=True)
    per_sequence = []
    for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        losses = [scalar_loss(batch, leaf, t, name) for t in range(start, end) if batch.response_mask_T[t]]
        if losses:
            per_sequence.append(losses)
    if LOSSES[name].normalize_by == "token":
        loss = sum(sum(losses) for losses in per_sequence) / sum(len(losses) for losses in per_sequence)
    else:
        loss = sum(sum(losses) / len(losses) for losses in per_sequence) / len(per_sequence)
    loss.backward()
    return loss.item(), leaf.grad.numpy()


def scalar_loss(batch, leaf, t, name):
    logp = leaf[t]
    if name == "sft":
        return -logp
    config, clip = CONFIGS[name], CONFIGS[name].objective
    old = logp.detach() if batch.old_logprobs_T is None else float(batch.old_logprobs_T[t])
    advantage, ratio = float(batch.advantages_T[t]), torch.exp(logp - old)
    loss = torch.max(-advantage * ratio, -advantage * torch.clamp(ratio, 1 - clip.clip_low, 1 + clip.clip_high))
    if clip.dual_clip is not None and advantage < 0:
        loss = torch.min(loss, torch.tensor(-advantage * clip.dual_clip, dtype=torch.float64))
    if config.kl_coefficient > 0:
        d = logp - float(batch.reference_logprobs_T[t])
        loss = loss + config.kl_coefficient * (torch.exp(-d) + d - 1).clamp(max=10)
    return loss


def single(batch):
    return [list(range(batch.num_sequences))]


@SETTINGS
@CASES
def test_plain_sums(seed, name, with_old):
    rng = np.random.default_rng(seed)
    batch = make_batch(rng, with_old=with_old)
    policy = Policy(rng, len(batch.token_ids_T))
    one_each = [[i] for i in range(batch.num_sequences)]
    expected_loss, expected_grad = reference(batch, policy, name)
    for micro_batches in (single(batch), one_each, [*one_each, []]):
        loss, grad, sums = run(batch, policy, LOSSES[name], micro_batches)
        assert loss == pytest.approx(expected_loss, rel=1e-4, abs=1e-5)
        assert step_statistics([sums], uses_reference=True, trains_mtp=False)["loss"] == pytest.approx(loss, abs=1e-5)
        np.testing.assert_allclose(grad, expected_grad, rtol=1e-4, atol=1e-6)


@settings(SETTINGS, max_examples=120)
@ALL_CASES
def test_split_free(seed, name, with_old):
    """Sums over sequences that context parallelism cuts need its ranks: tests/train/test_algorithm_ranks.py."""
    rng = np.random.default_rng(seed)
    batch = make_batch(rng, with_old=with_old)
    policy, objective = Policy(rng, len(batch.token_ids_T)), ALL[name]
    cuts = (1, 1) if name in OVER_SEQUENCES else (2, 3)
    whole = run(batch, policy, objective, single(batch))
    planner = MicroBatchPlanner(num_ranks=3, token_budget=24, token_multiple=8, sequence_multiple=2, attention_tokens=1000)
    plan = planner.plan(batch.lengths)
    shuffled = [members for rank in plan for members in rank]
    rng.shuffle(shuffled)
    for split in (
        run(batch, policy, objective, shuffled, token_multiple=8),
        run(batch, policy, objective, shuffled, token_multiple=8, cp=cuts[0]),
        run(batch, policy, objective, [list(rng.permutation(batch.num_sequences))], token_multiple=24, cp=cuts[1]),
    ):
        assert split[0] == pytest.approx(whole[0], rel=1e-5, abs=1e-6)
        np.testing.assert_allclose(split[1], whole[1], rtol=1e-5, atol=1e-8)
        # The loss, and what sums over a sequence, is summed in float32 before it becomes a statistic; the rest is summed in float64.
        rounding = 1e-5 if name in OVER_SEQUENCES else 1e-12
        np.testing.assert_allclose(split[2].sums[1:], whole[2].sums[1:], rtol=rounding, atol=rounding)
        assert split[2].mismatch_max == whole[2].mismatch_max


@settings(SETTINGS, max_examples=120)
@given(st.integers(0, 10**6), st.sampled_from(sorted(ALL)), st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
def test_masked_values(seed, name, poison):
    rng = np.random.default_rng(seed)
    batch = make_batch(rng)
    policy, objective = Policy(rng, len(batch.token_ids_T)), ALL[name]
    clean = run(batch, policy, objective, single(batch), token_multiple=8)
    policy.poison = poison
    policy.logprobs = np.where(batch.response_mask_T, policy.logprobs, poison)
    policy.entropies = np.where(batch.response_mask_T, policy.entropies, poison)
    dirty = run(poisoned(batch, poison), policy, objective, single(batch), token_multiple=8)
    assert dirty[0] == clean[0]
    assert dirty[1].tolist() == clean[1].tolist()
    assert dirty[2].sums.tolist() == clean[2].sums.tolist()
    assert dirty[2].mismatch_max == clean[2].mismatch_max


class EveryTokenCosts:
    """A loss that is not 0 for zero inputs, with every token clipped."""

    metric_names = ()

    def token_loss(self, columns):
        return TokenLoss(loss_T=5 - columns.logp_T, clipped_T=torch.ones_like(columns.mask_T))


def test_a_loss_that_is_not_zero_at_zero_counts_response_tokens_only():
    rng = np.random.default_rng(7)
    batch = make_batch(rng)
    policy = Policy(rng, len(batch.token_ids_T))
    loss, _, sums = run(batch, policy, Loss(objective=EveryTokenCosts()), single(batch), token_multiple=8)
    assert loss == pytest.approx(5 - policy.logprobs[batch.response_mask_T].mean(), rel=1e-5)
    assert step_statistics([sums], uses_reference=False, trains_mtp=False)["clip_fraction"] == 1


def test_nan_inside_the_mask_is_not_hidden():
    rng = np.random.default_rng(0)
    batch = make_batch(rng)
    policy = Policy(rng, len(batch.token_ids_T))
    policy.logprobs = np.where(batch.response_mask_T, np.nan, policy.logprobs)
    assert math.isnan(run(batch, policy, LOSSES["grpo"], single(batch))[0])


def test_tokens_without_a_loss_get_no_gradient():
    rng = np.random.default_rng(1)
    batch = make_batch(rng)
    _, grad, _ = run(batch, Policy(rng, len(batch.token_ids_T)), SUPERVISED, single(batch))
    assert (grad != 0).tolist() == batch.response_mask_T.tolist()


def test_a_loss_of_weighted_tokens_alone_trains_nothing_where_no_token_has_a_weight():
    counted = Denominators(num_tokens=5, num_sequences=2)
    assert counted.num_trained(SUPERVISED) == 0 and counted.num_trained(LOSSES["grpo"]) == counted.num_trained(ValueLossSettings()) == 5
    assert replace(counted, num_ce=3).num_trained(SUPERVISED) == 3


def test_a_micro_batch_of_padding_gives_zero_with_a_gradient_path():
    batch = make_batch(np.random.default_rng(2))
    columns = LossColumns.of(pack(batch, [], 4), device="cpu")
    logp = torch.full((4,), -1.0, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True):  # no NaN on the way either
        loss, sums = micro_batch_loss(logp, torch.ones(4), columns, LOSSES["grpo"], Denominators.of(batch))
        loss.backward()
    assert (loss.item(), logp.grad.tolist()) == (0, [0] * 4)
    assert not sums.sums.any()


def test_denominators_count_response_tokens_and_sequences_that_have_some():
    batch = make_batch(np.random.default_rng(3))
    with_response = sum(any(batch.response_mask_T[s:e]) for s, e in zip(batch.offsets[:-1], batch.offsets[1:], strict=True))
    assert with_response < batch.num_sequences
    assert Denominators.of(batch) == Denominators(num_tokens=int(batch.response_mask_T.sum()), num_sequences=with_response, num_servers=3)


def test_without_old_log_probs_the_ratio_is_one_and_kl_old_is_exactly_zero():
    rng = np.random.default_rng(4)
    batch = make_batch(rng, with_old=False)
    policy = Policy(rng, len(batch.token_ids_T))
    loss, grad, sums = run(batch, policy, LOSSES["dapo"], single(batch))
    statistics = step_statistics([sums], uses_reference=False, trains_mtp=False)
    mask = batch.response_mask_T
    assert (statistics["kl_old"], statistics["clip_fraction"]) == (0, 0)
    assert loss == pytest.approx(-batch.advantages_T[mask].mean(), abs=1e-6)
    np.testing.assert_allclose(grad[mask], -batch.advantages_T[mask] / mask.sum(), rtol=1e-5)


@SETTINGS
@given(st.integers(0, 10**6))
def test_statistics_agree_with_loops(seed):
    rng = np.random.default_rng(seed)
    batch = make_batch(rng)
    policy = Policy(rng, len(batch.token_ids_T))
    _, _, sums = run(batch, policy, LOSSES["grpo_token_kl"], [[i] for i in range(batch.num_sequences)])
    measured = step_statistics([sums], uses_reference=True, trains_mtp=False)

    response = np.flatnonzero(batch.response_mask_T)
    logp = policy.logprobs.astype(np.float32).astype(np.float64)
    old, ref, rollout = (c.astype(np.float64) for c in (batch.old_logprobs_T, batch.reference_logprobs_T, batch.rollout_logprobs_T))
    d = [logp[t] - rollout[t] for t in response]
    assert measured["num_tokens"] == len(response)
    assert measured["entropy"] == pytest.approx(np.mean([policy.entropies[t] for t in response]), rel=1e-6)
    assert measured["kl_old"] == pytest.approx(np.mean([min(math.exp(logp[t] - old[t]) + old[t] - logp[t] - 1, 10) for t in response]))
    assert measured["kl_reference"] == pytest.approx(
        np.mean([min(math.exp(ref[t] - logp[t]) + logp[t] - ref[t] - 1, 10) for t in response])
    )
    assert measured["mismatch_mean"] == pytest.approx(np.mean(np.abs(d)))
    assert measured["mismatch_max"] == pytest.approx(np.max(np.abs(d)))
    assert measured["mismatch_kl"] == pytest.approx(np.mean([min(math.exp(x) - x - 1, 10) for x in d]))
    clip = CONFIGS["grpo_token_kl"].objective
    assert measured["clip_fraction"] == pytest.approx(np.mean([is_clipped(batch, logp[t] - old[t], t, clip) for t in response]))


def is_clipped(batch, d, t, config):
    advantage, ratio = batch.advantages_T[t], math.exp(d)
    above = advantage > 0 and ratio > 1 + config.clip_high
    below = advantage < 0 and ratio < 1 - config.clip_low
    return above or below


def test_a_step_of_several_mini_batches_reports_the_mismatch_of_the_first():
    def sums_of(worst, **values):
        sums = torch.tensor([float(values.get(name, 0)) for name in SUMMED]).double()
        return LossSums(sums=sums, mismatch_max=torch.tensor(worst).double())

    first = sums_of(
        0.15, loss=1, num_tokens=2, num_sampled=2, entropy=4, kl_reference=2, mismatch=0.2, mismatch_kl=0.02, mtp_loss=5,
    )  # fmt: skip
    second = sums_of(
        5.0, loss=3, num_tokens=6, num_sampled=8, dropped=2, entropy=4, kl_old=6, kl_reference=6, clipped=4, mismatch=6, mismatch_kl=6,
        mtp_loss=4,
    )  # fmt: skip
    found = step_statistics([first, second], uses_reference=False, trains_mtp=True)
    expected = {
        "loss": 2, "num_tokens": 8, "entropy": 1, "kl_old": 0.75, "first_kl_old": 0, "kl_reference": None, "clip_fraction": 0.5,
        "correction_dropped": 0.2,
        "mismatch_mean": 0.1, "mismatch_max": 0.15, "mismatch_kl": 0.01, "num_compared": 2, "mtp_loss": 4.5,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_the_distance_from_a_teacher_is_that_of_the_first_mini_batch_with_one():
    def sums_of(**values):
        sums = torch.tensor([float(values.get(name, 0)) for name in SUMMED]).double()
        return LossSums(sums=sums, mismatch_max=torch.tensor(0.0).double())

    alone, taught, moved = sums_of(num_tokens=4), sums_of(num_tokens=4, kl_teacher=3, num_taught=2), sums_of(kl_teacher=9, num_taught=1)
    for mini_batches, distance in (([alone], None), ([taught, moved], 1.5), ([alone, taught, moved], 1.5)):
        assert step_statistics(mini_batches, uses_reference=False, trains_mtp=False)["kl_teacher"] == distance


def test_a_loss_in_float64_is_weighted_in_float64():
    batch = replace(make_batch(np.random.default_rng(6), with_old=False), ce_weight_T=None)
    packed = pack(batch, single(batch)[0], 1)
    logp = torch.full((len(packed.labels_T),), -1.0, dtype=torch.float64, requires_grad=True)
    columns = LossColumns.of(packed, device="cpu")
    loss, _ = micro_batch_loss(logp, torch.ones_like(logp), columns, LOSSES["grpo"], Denominators.of(batch))
    # The ratio is 1, so a sequence's loss is the advantage of its tokens.
    advantages = [batch.advantages_T[start] for start, tokens in zip(batch.offsets, batch.response_lengths, strict=False) if tokens]
    assert loss.item() == pytest.approx(-np.mean(np.float64(advantages)), rel=1e-14)


def test_half_precision_log_probs_are_summed_in_float32():
    rng = np.random.default_rng(5)
    batch = make_batch(rng)
    packed = pack(batch, single(batch)[0], 1)
    logp = torch.full((len(packed.labels_T),), -1.0, dtype=torch.bfloat16, requires_grad=True)
    loss, _ = micro_batch_loss(logp, torch.ones_like(logp), LossColumns.of(packed, device="cpu"), SUPERVISED, counts(batch))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(1, abs=1e-6)
