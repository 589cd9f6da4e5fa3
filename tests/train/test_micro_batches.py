"""The invariants listed in moerl/train/batching/micro_batch_plan.py and moerl/train/batching/packed_sequences.py."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.train.batching.micro_batch_plan import Balance, MicroBatchPlanner, split_mini_batches
from moerl.train.batching.packed_sequences import pack, unpack_scores, zigzag_positions
from moerl.train.batching.token_costs import sequence_costs
from moerl.types.batch import TrainBatch
from moerl.types.errors import ConfigError


@st.composite
def plan_inputs(draw):
    sequence_multiple, tp = draw(st.sampled_from([(1, 1), (1, 3), (4, 1), (4, 2), (1, 8)]))
    limits = dict(
        num_ranks=draw(st.integers(1, 5)),
        token_budget=draw(st.integers(64, 300)),
        token_multiple=sequence_multiple * tp,
        attention_tokens=draw(st.sampled_from([1e9, 200.0, 10.0])),
        sequence_multiple=sequence_multiple,
        count_multiple=draw(st.sampled_from([1, 1, 2, 3])),
        waits_in_rounds=draw(st.booleans()),
    )
    return draw(st.lists(st.integers(2, 56), max_size=60)), limits


def plan_micro_batches(lengths, **limits):
    return MicroBatchPlanner(**limits).plan(lengths)


def plan_of(lengths, **limits):
    return plan_micro_batches(lengths, **({"num_ranks": 1, "token_multiple": 1, "attention_tokens": 1000} | limits))


def padded_length(members, lengths, limits):
    multiple, slot = limits["token_multiple"], limits["sequence_multiple"]
    tokens = sum(-(-lengths[i] // slot) * slot for i in members)
    return -(-tokens // multiple) * multiple


def capacity_of(limits):
    return limits["token_budget"] // limits["token_multiple"] * limits["token_multiple"]


def slots_of(lengths, limits):
    multiple = limits["sequence_multiple"]
    return np.array([-(-length // multiple) * multiple for length in lengths], dtype=np.int64)


def costs_of(plan, lengths, limits):
    """Of every micro-batch, per rank."""
    costs = sequence_costs(slots_of(lengths, limits), limits["attention_tokens"])
    return [[sum(costs[i] for i in members) for members in rank] for rank in plan]


def random_batch(rng, num_sequences, *, columns=True):
    lengths = rng.integers(2, 12, num_sequences)
    num_tokens = int(lengths.sum())
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    mask = rng.random(num_tokens) < 0.6
    mask[offsets[:-1]] = False

    def values():
        return rng.normal(size=num_tokens).astype(np.float32)

    return TrainBatch(
        token_ids_T=rng.integers(1, 1000, num_tokens),
        response_mask_T=mask,
        rollout_logprobs_T=values(),
        advantages_T=values(),
        offsets=offsets,
        old_logprobs_T=values() if columns else None,
        reference_logprobs_T=values() if columns else None,
    )


SETTINGS = settings(derandomize=True, deadline=None, max_examples=150)


@SETTINGS
@given(plan_inputs())
def test_covers_once(inputs):
    lengths, limits = inputs
    plan = plan_micro_batches(lengths, **limits)
    assert sorted(i for rank in plan for members in rank for i in members) == list(range(len(lengths)))


@SETTINGS
@given(plan_inputs())
def test_within_budget(inputs):
    lengths, limits = inputs
    for rank in plan_micro_batches(lengths, **limits):
        assert all(padded_length(members, lengths, limits) <= limits["token_budget"] for members in rank)


@SETTINGS
@given(plan_inputs())
def test_equal_counts(inputs):
    lengths, limits = inputs
    plan = plan_micro_batches(lengths, **limits)
    assert len(plan) == limits["num_ranks"]
    (count,) = {len(rank) for rank in plan}
    assert count >= 1
    assert count % limits["count_multiple"] == 0


@SETTINGS
@given(plan_inputs())
def test_no_needless_empties(inputs):
    lengths, limits = inputs
    sizes = [len(members) for rank in plan_micro_batches(lengths, **limits) for members in rank]
    assert sizes.count(0) == max(len(sizes) - len(lengths), 0)


@SETTINGS
@given(plan_inputs())
def test_fewest_rounds(inputs):
    lengths, limits = inputs
    plan = plan_micro_batches(lengths, **limits)
    # Two bins of first-fit are together over the capacity, hence fewer than 2 * total / capacity + 1 bins.
    bins = 2 * slots_of(lengths, limits).sum() / capacity_of(limits) + 1
    step = limits["num_ranks"] * limits["count_multiple"]
    assert len(plan[0]) * limits["num_ranks"] <= -(-bins // step) * step


@SETTINGS
@given(plan_inputs())
def test_costliest_first(inputs):
    lengths, limits = inputs
    for rank in costs_of(plan_micro_batches(lengths, **limits), lengths, limits):
        assert all(earlier >= later - 1e-6 for earlier, later in pairwise(rank))


@SETTINGS
@given(plan_inputs())
def test_balanced(inputs):
    lengths, limits = inputs
    totals = [sum(rank) for rank in costs_of(plan_micro_batches(lengths, **limits), lengths, limits)]
    full = sequence_costs(np.array([capacity_of(limits)]), limits["attention_tokens"])[0]
    assert max(totals) <= np.mean(totals) + full + 1e-6

    roomy = limits | {"token_budget": 4000, "count_multiple": 1, "waits_in_rounds": False}
    totals = [sum(rank) for rank in costs_of(plan_micro_batches(lengths, **roomy), lengths, roomy)]
    longest = sequence_costs(slots_of(lengths, limits), limits["attention_tokens"]).max(initial=0)
    assert max(totals) - min(totals) <= longest + 1e-6


@SETTINGS
@given(plan_inputs())
def test_even_rounds(inputs):
    lengths, limits = inputs
    limits = limits | {"waits_in_rounds": True}
    per_rank = costs_of(plan_micro_batches(lengths, **limits), lengths, limits)
    rounds = list(zip(*per_rank, strict=True))
    assert all(min(earlier) >= max(later) - 1e-6 for earlier, later in pairwise(rounds))
    totals = [sum(rank) for rank in per_rank]
    assert max(totals) - min(totals) <= max(max(costs) - min(costs) for costs in rounds) + 1e-6


@SETTINGS
@given(plan_inputs())
def test_neither_imbalance_is_below_one_and_waiting_in_rounds_is_never_cheaper(inputs):
    lengths, limits = inputs
    options = {name: limits[name] for name in ("sequence_multiple", "attention_tokens")}
    balance = Balance.of(plan_micro_batches(lengths, **limits), lengths, **options)
    assert 1 - 1e-9 <= balance.rank_imbalance <= balance.round_imbalance + 1e-9


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("mu", "sigma"), [(7.0, 1.0), (7.6, 1.2), (8.5, 0.7)])
def test_a_long_tailed_batch_is_even_over_many_ranks(mu, sigma, seed):
    """The case of benchmarks/balance.py: 8192 samples of up to 32768 tokens on 32 ranks."""
    lengths = np.random.default_rng(seed).lognormal(mu, sigma, 8192).astype(int).clip(16, 32768)
    limits = dict(num_ranks=32, token_budget=32768, token_multiple=8, attention_tokens=24576, sequence_multiple=4)
    plan = plan_micro_batches(lengths, **limits)
    assert Balance.of(plan, lengths, sequence_multiple=4, attention_tokens=24576).rank_imbalance < 1.01
    padded = sum(padded_length(members, lengths, limits) for rank in plan for members in rank)
    assert 1 - lengths.sum() / padded < 0.02

    waiting = plan_micro_batches(lengths, **limits, waits_in_rounds=True)
    assert Balance.of(waiting, lengths, sequence_multiple=4, attention_tokens=24576).round_imbalance < 1.04


def test_waiting_ranks_get_their_long_sequences_in_the_same_round():
    lengths = [1000, 900, *[50] * 40]
    plan = plan_of(lengths, num_ranks=2, token_budget=1000, waits_in_rounds=True)
    assert [rank[0][0] for rank in plan] == [0, 1]


def test_attention_makes_one_long_sequence_cost_more_than_short_ones_of_as_many_tokens():
    """At length attention_tokens a sequence costs twice its length: it is worth two thousand tokens of short ones."""
    lengths = [1000, *[10] * 300]
    plan = plan_of(lengths, num_ranks=2, token_budget=4000, attention_tokens=1000)
    (alone,) = [rank[0] for rank in plan if 0 in rank[0]]
    assert sum(lengths[i] for i in alone) == pytest.approx(1500, abs=20)


def test_a_plan_without_sequences_is_even():
    balance = Balance.of([[[]], [[]]], np.array([], dtype=np.int64), sequence_multiple=1, attention_tokens=1000)
    assert (balance.rank_imbalance, balance.round_imbalance) == (1, 1)


def test_mini_batches_add_up():
    lengths = np.array([4, 2, 3])
    uneven, even = (Balance.of(plan, lengths, sequence_multiple=1, attention_tokens=1e12) for plan in ([[[0]], [[1]]], [[[2]], [[2]]]))
    assert (uneven.rank_imbalance, even.rank_imbalance) == pytest.approx((4 / 3, 1))
    assert (uneven + even).rank_imbalance == pytest.approx(7 / 6)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("slots", [[24], [48, 240], [240, 24, 48]])
def test_zigzag_is_even(slots, num_ranks):
    """Keys a query attends to are its position in its sequence plus one; every context-parallel rank sums to the same."""
    bounds = np.concatenate([[0], np.cumsum(slots)]).astype(np.int32)
    position_T = np.arange(bounds[-1]) - np.repeat(bounds[:-1], np.diff(bounds))
    mine = [zigzag_positions(bounds, rank, num_ranks) for rank in range(num_ranks)]
    assert sorted(np.concatenate(mine)) == list(range(bounds[-1]))
    assert len({len(positions) for positions in mine}) == 1
    assert len({int((position_T[positions] + 1).sum()) for positions in mine}) == 1


@SETTINGS
@given(plan_inputs())
def test_deterministic(inputs):
    lengths, limits = inputs
    assert plan_micro_batches(lengths, **limits) == plan_micro_batches(np.array(lengths, dtype=np.int32), **limits)


def test_a_tight_fit_that_cost_balancing_misses_is_still_found():
    plan = plan_of([8, 7, 5, 5, 5], num_ranks=1, token_budget=15, token_multiple=1)
    assert sorted(plan[0]) == [[0, 1], [2, 3, 4]]


def test_a_tight_fit_is_spread_over_all_micro_batches():
    # Fifteen full micro-batches, found by first-fit alone; two ranks need sixteen.
    lengths = [
        4,
        4,
        5,
        5,
        6,
        7,
        7,
        7,
        7,
        8,
        9,
        10,
        10,
        10,
        10,
        11,
        11,
        11,
        13,
        13,
        14,
        14,
        15,
        15,
        15,
        16,
        16,
        17,
        17,
        19,
        19,
        22,
        23,
        30,
        30,
    ]
    plan = plan_of(lengths, num_ranks=2, token_budget=30)
    assert [len(rank) for rank in plan] == [8, 8]
    assert all(members for rank in plan for members in rank)


def test_too_few_sequences_leave_empty_micro_batches():
    assert plan_of([5], num_ranks=3, token_budget=8, token_multiple=4) == [[[0]], [[]], [[]]]
    assert plan_of([], num_ranks=2, token_budget=8, token_multiple=1) == [[[]], [[]]]


def test_a_sequence_over_the_budget_is_refused_with_the_value_that_works():
    with pytest.raises(ConfigError, match=r"train.micro_batch_tokens = 11: must be at least 12 for the longest sequence, 9 tokens"):
        plan_of([3, 9], num_ranks=1, token_budget=11, token_multiple=4)
    assert plan_of([3, 9], num_ranks=1, token_budget=12, token_multiple=4) == [[[0, 1]]]


@SETTINGS
@given(st.integers(0, 10**6), st.integers(1, 8), st.sampled_from([(1, 1), (4, 1), (8, 4), (6, 2)]), st.booleans())
def test_a_packed_row_holds_each_label_where_it_is_predicted(seed, num_sequences, multiples, columns):
    rng = np.random.default_rng(seed)
    batch = random_batch(rng, num_sequences, columns=columns)
    indices = rng.permutation(num_sequences)[: rng.integers(1, num_sequences + 1)].tolist()
    token_multiple, sequence_multiple = multiples
    packed = pack(batch, indices, token_multiple, sequence_multiple)

    expected_starts, position = [], 0
    for i in indices:
        expected_starts.append(position)
        first, end = batch.offsets[i], batch.offsets[i + 1]
        for t in range(first, end):
            at = position + t - first
            assert packed.token_ids_T[at] == batch.token_ids_T[t]
            assert packed.position_ids_T[at] == t - first
            if t + 1 < end:
                assert packed.labels_T[at] == batch.token_ids_T[t + 1]
                assert packed.label_index_T[at] == t + 1
                assert packed.response_mask_T[at] == batch.response_mask_T[t + 1]
                assert packed.response_tokens_T[at] == batch.response_mask_T[first:end].sum()
                for name in ("rollout_logprobs_T", "advantages_T") + (("old_logprobs_T", "reference_logprobs_T") if columns else ()):
                    assert getattr(packed, name)[at] == getattr(batch, name)[t + 1]
            else:
                assert (packed.labels_T[at], packed.label_index_T[at], packed.response_mask_T[at]) == (0, -1, False)
        position += -(-(end - first) // sequence_multiple) * sequence_multiple
    assert packed.cu_seqlens[: len(indices)].tolist() == expected_starts
    assert columns or packed.old_logprobs_T is None
    check_row(packed, token_multiple, sequence_multiple, num_real=sum(batch.lengths[i] for i in indices))


def check_row(packed, token_multiple, sequence_multiple, num_real):
    num_tokens = len(packed.token_ids_T)
    slots = np.diff(packed.cu_seqlens)
    assert packed.cu_seqlens.dtype == np.int32
    assert (packed.cu_seqlens[0], packed.cu_seqlens[-1]) == (0, num_tokens)
    assert (slots > 0).all()
    assert (slots % sequence_multiple == 0).all()
    assert num_tokens % token_multiple == 0
    assert num_tokens - num_real == packed.num_padding
    assert packed.max_seqlen == slots.max()
    assert packed.response_mask_T.sum() <= (packed.label_index_T >= 0).sum()
    assert not packed.response_tokens_T[packed.label_index_T < 0].any()


@pytest.mark.parametrize(("token_multiple", "num_tokens"), [(1, 2), (2, 2), (3, 3), (8, 8)])
def test_an_empty_micro_batch_is_one_dummy_sequence(token_multiple, num_tokens):
    packed = pack(random_batch(np.random.default_rng(0), 2), [], token_multiple)
    assert packed.cu_seqlens.tolist() == [0, num_tokens]
    assert (packed.num_padding, packed.max_seqlen, packed.response_mask_T.any()) == (num_tokens, num_tokens, False)


@SETTINGS
@given(st.integers(0, 10**6), st.integers(1, 20), st.integers(1, 3))
def test_round_trip(seed, num_sequences, num_ranks):
    rng = np.random.default_rng(seed)
    batch = random_batch(rng, num_sequences)
    plan = plan_of(batch.lengths, num_ranks=num_ranks, token_budget=32, token_multiple=4, sequence_multiple=2)
    truth = np.arange(1, len(batch.token_ids_T) + 1, dtype=np.float32)

    def piece(indices):
        packed = pack(batch, indices, 4, 2)
        return packed, np.where(packed.label_index_T >= 0, truth[packed.label_index_T], np.nan)

    per_rank = [unpack_scores([piece(indices) for indices in rank], batch) for rank in plan]
    truth[batch.offsets[:-1]] = 0
    assert sum(per_rank).tolist() == truth.tolist()


@pytest.mark.parametrize(("num_sequences", "num_updates", "sizes"), [(8, 2, [4, 4]), (7, 3, [3, 2, 2]), (2, 4, [1, 1]), (5, 1, [5])])
def test_mini_batches_are_consecutive_and_never_empty(num_sequences, num_updates, sizes):
    parts = split_mini_batches(num_sequences, num_updates)
    assert [len(part) for part in parts] == sizes
    assert np.concatenate(parts).tolist() == list(range(num_sequences))


@SETTINGS
@given(st.integers(0, 10**6), st.integers(1, 8), st.sampled_from([1, 2, 4]))
def test_routes_stand_at_their_tokens_on_every_context_parallel_rank_and_padding_has_none(seed, num_sequences, cp):
    rng = np.random.default_rng(seed)
    batch = random_batch(rng, num_sequences)
    routes_T = np.repeat(np.arange(len(batch.token_ids_T), dtype=np.uint16), 6).reshape(-1, 3, 2)
    chosen = rng.permutation(num_sequences)[: rng.integers(1, num_sequences + 1)].tolist()
    whole = pack(replace(batch, routes_T=routes_T), chosen, 4 * cp, 2 * cp if cp > 1 else 1)
    found = []
    for rank in range(cp):
        part = whole.part_of(rank, cp)
        assert (part.routes_T[~part.is_token_T] == 65535).all()
        assert (batch.token_ids_T[part.routes_T[part.is_token_T][:, 2, 1]] == part.token_ids_T[part.is_token_T]).all()
        found += part.routes_T[part.is_token_T][:, 0, 0].tolist()
    assert sorted(found) == sorted(t for i in chosen for t in range(batch.offsets[i], batch.offsets[i + 1]))
