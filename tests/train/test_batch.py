"""From groups to the sequences of a TrainBatch."""

import math
from dataclasses import replace

import numpy as np
import pytest
from stored_here import stored_here

from moerl.algorithms.algorithm import build_algorithm
from moerl.companions.distillation import refuse_weights
from moerl.config.algorithm_settings import algorithm, of_plain
from moerl.train.batching.build_batch import build_batch, credited, sft_batch, with_proximal
from moerl.types.completion import Completion, VersionSpan
from moerl.types.errors import DataError
from moerl.types.groups import Group, Prompt, Sample, Score
from moerl.types.routes import RouteShape
from moerl.types.stored import Here, Payload, StoredCompletion

GRPO = build_algorithm(algorithm("grpo"), 8)


def make_sample(token_ids, reward, *, prompt=(100, 101), finish_reason="stop", error=None, routes=None):
    completion = Completion(
        request_id="r",
        token_ids=tuple(token_ids),
        logprobs=tuple(-token / 10 for token in token_ids),
        spans=(VersionSpan(version=0, num_tokens=len(token_ids)),),
        finish_reason=finish_reason,
        routes=routes,
    )
    return Sample(completion=stored_here(prompt, completion), score=Score(reward=reward, error=error))


def make_segment(token_ids, *, produced=None, weights=None, prompt=(100, 101)):
    """A segment in which the policy produced the tokens for which `produced` is True."""
    mask = None if produced is None else np.array(produced)
    payload = Payload(
        prompt_ids=np.array(prompt, dtype=np.int32),
        token_ids=np.array(token_ids, dtype=np.int32),
        logprobs=-np.array(token_ids, dtype=np.float32) / 10,
        routes=None,
        text="",
        mask=mask,
        weights={name: np.array(values, dtype=np.float32) for name, values in (weights or {}).items()},
    )
    num_tokens = len(token_ids) if mask is None else int(mask.sum())
    spans = (VersionSpan(version=2, num_tokens=1), VersionSpan(version=3, num_tokens=num_tokens - 1, push_id="p"))
    completion = Completion(request_id="r", token_ids=(), logprobs=(), spans=spans, finish_reason="stop")
    return StoredCompletion.of(completion, payload, Here(payload))


TURNS = make_segment([1, 2, 3, 4, 5], produced=[True, True, False, False, True], weights={"ce": [0, 0, 0.1, 0.1, 0]})
SUMMED_UP = make_segment([6, 7], prompt=(9,))
OF_TWO_SEGMENTS = Sample(completion=SUMMED_UP, earlier=(TURNS,), score=Score(reward=1.0))


def make_group(*samples, index=0):
    task = Prompt(index=index, token_ids=(100, 101), text="", data_source="test", ground_truth="")
    return Group(prompt=task, samples=samples)


def laid_out(batch):
    return batch.laid_out(range(batch.num_sequences))


def test_a_batch_lays_prompt_and_response_end_to_end():
    groups = [make_group(make_sample([1, 2, 3], 1), make_sample([4], 0)), make_group(make_sample([5, 6], 0.5, prompt=(9,)), index=1)]
    batch = laid_out(build_batch(groups, GRPO))
    credit = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert batch.offsets.tolist() == [0, 5, 8, 11]
    assert batch.token_ids_T.tolist() == [100, 101, 1, 2, 3, 100, 101, 4, 9, 5, 6]
    assert batch.response_mask_T.tolist() == [False, False, True, True, True, False, False, True, False, True, True]
    assert batch.rollout_logprobs_T.tolist() == pytest.approx([0, 0, -0.1, -0.2, -0.3, 0, 0, -0.4, 0, -0.5, -0.6])
    assert batch.advantages_T.tolist() == pytest.approx([0, 0, credit, credit, credit, 0, 0, -credit, 0, 0, 0])
    assert [column.dtype.name for column in (batch.token_ids_T, batch.response_mask_T, batch.rollout_logprobs_T, batch.advantages_T)] == [
        "int64", "bool", "float32", "float32",
    ]  # fmt: skip
    assert batch.old_logprobs_T is batch.reference_logprobs_T is batch.routes_T is None


def test_a_sample_of_several_segments_has_their_credit_in_each_and_tools_none():
    group = make_group(OF_TWO_SEGMENTS, make_sample([8], 0.0))
    assert group.lengths_G.tolist() == [5, 1]
    stored = build_batch([group], GRPO, servers={"p": 4})
    batch = laid_out(stored)
    credit = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert batch.offsets.tolist() == stored.offsets.tolist() == [0, 7, 10, 13]
    assert batch.token_ids_T.tolist() == [100, 101, 1, 2, 3, 4, 5, 9, 6, 7, 100, 101, 8]
    produced = [False, False, True, True, False, False, True, False, True, True, False, False, True]
    assert batch.response_mask_T.tolist() == stored.response_mask_T().tolist() == produced
    assert batch.advantages_T.tolist() == pytest.approx([0, 0, credit, credit, 0, 0, credit, 0, credit, credit, 0, 0, -credit])
    assert batch.ce_weight_T.tolist() == pytest.approx([0, 0, 0, 0, 0.1, 0.1, 0, 0, 0, 0, 0, 0, 0])
    assert batch.server_T.tolist() == [-1, -1, -1, 4, -1, -1, 4, -1, -1, 4, -1, -1, -1]
    assert batch.response_lengths.tolist() == stored.response_lengths.tolist() == [3, 2, 1]
    for position in range(8):
        assert stored.num_responses_from(position) == batch.num_responses_from(position)
    only = stored.select([1, 0]).select([1])
    assert only.laid_out([0]).token_ids_T.tolist() == [100, 101, 1, 2, 3, 4, 5]
    assert only.num_responses_from(3) == 2


@pytest.mark.parametrize(("recomputes", "server"), [(False, -1), (True, 0)])
def test_tokens_after_a_prompt_that_met_a_push_are_compared_only_if_it_was_computed_anew(recomputes, server):
    """Of keys and values of two versions no log-probs are known."""
    sample = make_sample([1, 2], 1)
    completion = replace(sample.completion, spans=(VersionSpan(version=2, num_tokens=2, push_id="p"),), met_push=True)
    groups = [make_group(replace(sample, completion=completion), make_sample([8], 0.0))]
    stored = build_batch(groups, GRPO, servers={"p": 0}, recomputes=recomputes)
    assert stored.fresh[0].tolist() == [server, 2 if recomputes else 0]


@pytest.mark.parametrize(("routes", "server"), [(None, 0), (RouteShape(num_layers=1, top_k=1, num_experts=2), -1)])
def test_tokens_after_a_push_are_not_compared_where_the_trainer_replays_the_routes_of_those_before_it(routes, server):
    """The server computed the tokens before anew, with routes of the new weights."""
    sample = make_sample([1, 2, 3], 1)
    spans = (VersionSpan(version=1, num_tokens=1, push_id="old"), VersionSpan(version=2, num_tokens=2, push_id="p"))
    completion = replace(sample.completion, spans=spans, routes_bytes=1)
    other = make_sample([8], 0.0)
    groups = [make_group(replace(sample, completion=completion), replace(other, completion=replace(other.completion, routes_bytes=1)))]
    stored = build_batch(groups, GRPO, routes, servers={"p": 0})
    assert stored.fresh[0].tolist() == [server, 2 if server == 0 else 0]


def test_the_age_of_a_token_stands_at_the_tokens_that_the_policy_produced():
    groups = [make_group(OF_TWO_SEGMENTS, make_sample([8], 0.0))]
    batch = laid_out(with_proximal(build_batch(groups, GRPO), groups, GRPO, 3))
    half = (3 - 2) / (4 - 2)
    assert batch.proximal_T.tolist() == [0, 0, half, 0, 0, 0, 0, 0, half, 0, 0, 0, 0.75]


def test_a_distance_from_a_teacher_is_refused_where_there_is_none():
    taught = Sample(completion=make_segment([1, 2], weights={"kl": [1, 1]}), score=Score(reward=1.0))
    with pytest.raises(DataError, match="and there is none"):
        refuse_weights(build_batch([make_group(taught, make_sample([8], 0.0))], GRPO))


def test_credit_of_tokens_runs_through_the_segments_of_a_sample_and_takes_the_kl_from_their_reward():
    settings = ("advantage.gamma=0.5", "kl_coefficient=0.1", "kl_in=reward", "kl_estimator=k1")
    pp = build_algorithm(algorithm("reinforce_pp", *settings), 8)
    groups = [make_group(OF_TWO_SEGMENTS, make_sample([8], 0.0))]
    batch = build_batch(groups, pp)
    old_T, reference_T = np.full(13, -1.0, dtype=np.float32), np.full(13, -1.5, dtype=np.float32)
    batch = credited(replace(batch, old_logprobs=Here(old_T), reference_logprobs=Here(reference_T)), groups, pp)
    rewards = [-0.05, -0.05, -0.05, -0.05, 0.95]
    to_come = [sum(0.5**ahead * reward for ahead, reward in enumerate(rewards[first:])) for first in range(5)] + [-0.05]
    expected = (np.array(to_come) - np.mean(to_come)) / np.sqrt(np.var(to_come, ddof=1) + 1e-8)
    mask_T = batch.response_mask_T()
    assert laid_out(batch).advantages_T[mask_T].tolist() == pytest.approx(expected.tolist(), rel=1e-6)
    assert not laid_out(batch).advantages_T[~mask_T].any()
    assert laid_out(batch.select([1])).advantages_T.tolist() == pytest.approx([0, *expected[3:5]], rel=1e-6)


def test_an_advantage_of_turns_gets_tokens_turns_and_the_log_probs_that_servers_said(tmp_path, monkeypatch):
    (tmp_path / "by_turn.py").write_text(BY_TURN)
    monkeypatch.chdir(tmp_path)
    own = build_algorithm(of_plain({"advantage": {"kind": "custom", "path": "by_turn.py:ByTurn"}, "objective": {"kind": "ppo_clip"}}), 8)
    groups = [make_group(OF_TWO_SEGMENTS, make_sample([8], 0.0))]
    batch = credited(build_batch(groups, own), groups, own)
    ids, turn = np.array([1, 2, 5, 6, 7, 8]), np.array([0, 0, 1, 2, 2, 0])
    expected = ids + 100 * turn - ids / 10
    assert laid_out(batch).advantages_T[batch.response_mask_T()].tolist() == pytest.approx(expected.tolist(), rel=1e-6)


BY_TURN = """\
from dataclasses import dataclass

from moerl.algorithms.advantages import Credit


@dataclass
class ByTurn:
    needs = {"tokens"}

    def __call__(self, step):
        tokens = step.tokens
        return Credit(advantages_N=tokens.token_ids_N + 100 * tokens.turn_N + tokens.rollout_N)
"""


def test_samples_outside_the_mask_with_errors_or_without_tokens_are_left_out():
    masking = build_algorithm(algorithm("dapo", "overlong=mask"), 8)
    group = make_group(
        make_sample([1], 1),
        make_sample([2], math.nan, error="verifier died"),
        make_sample([3], 1, finish_reason="length"),
        make_sample([], 0),
        make_sample([4], 0),
    )
    assert laid_out(build_batch([group], masking)).token_ids_T.tolist() == [100, 101, 1, 100, 101, 4]


def test_a_sample_without_credit_stays_in_the_batch():
    assert build_batch([make_group(make_sample([1], 1), make_sample([2], 1))], GRPO).num_sequences == 2


def test_a_batch_in_which_nothing_is_left_says_why():
    group = make_group(make_sample([1], 0, error="verifier died"))
    with pytest.raises(DataError, match="batch of 1 groups = 0 samples to train on: 1 could not be scored, the first: verifier died"):
        build_batch([group], GRPO)


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_not_a_number_is_refused_with_its_prompt(reward):
    with pytest.raises(DataError, match=r"prompt 7 \(test\): reward"):
        build_batch([make_group(make_sample([1], 0), make_sample([2], reward), index=7)], GRPO)


def test_an_empty_prompt_is_refused():
    with pytest.raises(DataError, match="prompt 0 .*0 prompt tokens"):
        build_batch([make_group(make_sample([1], 0, prompt=()))], GRPO)
    with pytest.raises(DataError, match="warm-start example: 0 prompt tokens"):
        sft_batch([((), (1,))])


def test_a_warm_start_batch_trains_on_the_answers():
    batch = sft_batch([((1, 2), (3,)), ([4], [5, 6])])
    assert batch.token_ids_T.tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.response_mask_T.tolist() == [False, False, True, False, True, True]
    assert batch.offsets.tolist() == [0, 3, 6]
    assert batch.ce_weight_T.tolist() == [0, 0, 1, 0, 1, 1]
    assert not batch.rollout_logprobs_T.any()
    assert not batch.advantages_T.any()


def test_routes_stand_at_their_tokens_and_the_last_of_a_sequence_has_none():
    shape = RouteShape(num_layers=2, top_k=1, num_experts=300)
    lengths = (3, 1)
    routes = [np.full((2 + length - 1, 2, 1), 10 * length, dtype=np.uint16) for length in lengths]
    samples = [make_sample([1] * length, length, routes=of_sample) for length, of_sample in zip(lengths, routes, strict=True)]
    batch = build_batch([make_group(*samples)], GRPO, shape)
    whole = laid_out(batch)
    assert (whole.routes_T.dtype, whole.routes_T.shape, batch.routes_shape) == (np.uint16, (8, 2, 1), (2, 1))
    assert whole.routes_T[:, 1, 0].tolist() == [30, 30, 30, 30, 65535, 10, 10, 65535]
    assert laid_out(build_batch([make_group(*samples)], GRPO)).routes_T is laid_out(batch.without_routes()).routes_T is None
    assert batch.laid_out([1, 0]).routes_T[:, 0, 0].tolist() == [10, 10, 65535, 30, 30, 30, 30, 65535]
