"""A step's sequences by reference: which rank gets which, and that what a rank lays out is what the whole batch would be."""

import pickle
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moerl.train.batching.micro_batch_plan import MicroBatchPlanner, split_mini_batches
from moerl.train.batching.rank_share import Share, shares
from moerl.train.loss.batch_loss import Denominators
from moerl.types.batch import StoredBatch
from moerl.types.kept_vocabulary import KeptVocabulary
from moerl.types.routes import RouteShape
from moerl.types.stored import Here, Payload, fetch

SHAPE = RouteShape(num_layers=3, top_k=2, num_experts=16)
COLUMNS = ("token_ids_T", "response_mask_T", "rollout_logprobs_T", "advantages_T", "old_logprobs_T", "reference_logprobs_T", "routes_T")


def stored_batch(lengths, *, old=None, reference=None):
    """`lengths`: (prompt, response) of each sequence. Every value in it is different."""
    rng = np.random.default_rng(len(lengths))
    payloads = [
        Payload(
            prompt_ids=rng.integers(0, 1000, prompt).astype(np.int32),
            token_ids=rng.integers(0, 1000, response).astype(np.int32),
            logprobs=-rng.random(response).astype(np.float32),
            routes=rng.integers(0, 16, (prompt + response - 1, SHAPE.num_layers, SHAPE.top_k)).astype(np.uint8),
            text="",
        )
        for prompt, response in lengths
    ]
    prompts, responses = np.array(lengths, dtype=np.int64).T
    return StoredBatch(
        payloads=tuple(map(Here, payloads)),
        prompt_lengths=prompts,
        response_lengths=responses,
        advantages=rng.normal(size=len(lengths)).astype(np.float32),
        starts=np.concatenate([[0], np.cumsum(prompts + responses)[:-1]]),
        routes=SHAPE,
        old_logprobs=old,
        reference_logprobs=reference,
    )


def test_a_payload_is_whole_however_it_was_packed():
    plain = stored_batch([(3, 2)]).payloads[0].get()
    sets = KeptVocabulary.of_counts(np.array([4, 7, 9], dtype=np.int32), np.array([1, 2]))
    weights = {"ce": np.array([0.5, 1.0], dtype=np.float32)}
    for payload in (plain, replace(plain, routes=None, text="two", mask=np.array([True, False]), sets=sets, weights=weights)):
        found = Payload.unpacked(payload.packed())
        np.testing.assert_equal(asdict(found), asdict(payload))
        for name in ("prompt_ids", "token_ids", "logprobs"):
            assert getattr(found, name).dtype == getattr(payload, name).dtype


def planner(num_ranks):
    return MicroBatchPlanner(
        num_ranks=num_ranks, token_budget=64, token_multiple=1, attention_tokens=100.0, sequence_multiple=1, count_multiple=1,
        waits_in_rounds=False,
    )  # fmt: skip


def everything(batch):
    return batch.laid_out(np.arange(batch.num_sequences))


LENGTHS = st.lists(st.tuples(st.integers(1, 10), st.integers(1, 30)), min_size=1, max_size=24)


@given(lengths=LENGTHS, num_ranks=st.integers(1, 4), num_updates=st.integers(1, 3))
def test_every_sequence_goes_to_one_rank_which_can_lay_out_all_it_runs(lengths, num_ranks, num_updates):
    batch, plans = stored_batch(lengths), planner(num_ranks)
    parts = shares(batch, plans, num_updates)
    owners = np.sum([[payload is not None for payload in part.payloads] for part in parts], axis=0)
    assert owners.tolist() == [1] * len(lengths)
    whole = everything(batch)
    for rank, share_of_rank in enumerate(parts):
        for members in split_mini_batches(batch.num_sequences, num_updates):
            mini_batch = share_of_rank.select(members)
            share = Share.of(mini_batch, plans.plan(mini_batch.lengths)[rank])
            expected = whole.select(members[share.sequences])
            for name in COLUMNS:
                np.testing.assert_array_equal(getattr(share.batch, name), getattr(expected, name), err_msg=name)


def test_a_sequence_of_another_rank_cannot_be_laid_out():
    batch = stored_batch([(2, 3), (1, 4)]).share({1})
    assert batch.laid_out([1]).num_sequences == 1
    with pytest.raises(AssertionError, match="the plans of driver and rank differ"):
        batch.laid_out([0, 1])


@given(lengths=LENGTHS, position=st.integers(0, 12))
def test_counts_need_no_payload(lengths, position):
    batch = stored_batch(lengths)
    whole, counted = everything(batch), batch.share(())
    assert counted.response_lengths.tolist() == whole.response_lengths.tolist()
    assert counted.offsets.tolist() == whole.offsets.tolist()
    assert counted.num_responses_from(position) == whole.num_responses_from(position)
    assert Denominators.of(counted) == Denominators.of(whole)
    assert counted.routes_shape == whole.routes_shape == (3, 2)


def test_log_probs_of_the_whole_step_are_cut_for_mini_batches_in_any_order():
    lengths = [(2, 3), (1, 4), (3, 1)]
    values_T = np.arange(14, dtype=np.float32)
    batch = stored_batch(lengths, old=Here(values_T), reference=Here(values_T + 100))
    part = batch.select([2, 0]).laid_out([1, 0])
    assert part.old_logprobs_T.tolist() == [0, 1, 2, 3, 4, 10, 11, 12, 13]
    assert (part.reference_logprobs_T - 100).tolist() == part.old_logprobs_T.tolist()
    of_rollout = replace(batch, old_logprobs="rollout").laid_out([1])
    np.testing.assert_array_equal(of_rollout.old_logprobs_T, of_rollout.rollout_logprobs_T)


def test_a_teacher_s_weights_are_of_responses_and_other_prompts_take_the_place_of_those_that_are_stored():
    batch = stored_batch([(2, 3), (1, 4), (3, 1)])
    columns = {"teacher_logprobs": Here(np.arange(14, dtype=np.float32)), "kl_weights": np.array([1, 0, 0.5], dtype=np.float32)}
    part = replace(batch, streams=frozenset({"kl"}), **columns).select([2, 0]).laid_out([0, 1])
    assert part.kl_weight_T.tolist() == [0, 0, 0, 0.5, 0, 0, 1, 1, 1]
    assert part.teacher_logprobs_T.tolist() == [10, 11, 12, 13, 0, 1, 2, 3, 4]
    others = replace(batch.without_routes(), prompts=((7,), (8, 9), ()), prompt_lengths=np.array([1, 2, 0])).select([1, 0])
    laid_out, whole = others.laid_out([0, 1]), everything(batch)
    assert laid_out.offsets.tolist() == [0, 6, 10] == others.offsets.tolist()
    assert laid_out.token_ids_T.tolist() == [8, 9, *whole.token_ids_T[6:10], 7, *whole.token_ids_T[2:5]]
    assert laid_out.response_mask_T.tolist() == [False] * 2 + [True] * 4 + [False] + [True] * 3


def test_values_of_a_share_come_back_to_their_places():
    batch = stored_batch([(2, 3), (1, 4), (3, 1)])
    share = Share.of(batch, [[2], [1]])
    assert (share.sequences.tolist(), share.bins) == ([1, 2], [[1], [0]])
    spread_T = share.spread(np.arange(1, 10), batch)
    assert spread_T.tolist() == [0] * 5 + list(range(1, 10))


def test_a_batch_without_its_payloads_is_small():
    batch = stored_batch([(10, 30)] * 200)
    assert len(pickle.dumps(batch.share(()))) < 200 * 40
    assert len(pickle.dumps(batch)) > 200 * 30 * (8 + 6)


def test_values_are_fetched_in_order_wherever_they_are():
    assert fetch([Here(3), Here(1), Here(2)]) == [3, 1, 2]
    assert fetch([]) == []
