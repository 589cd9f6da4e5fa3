"""All-to-alls through memory bring what gloo's bring, and tell of a lost rank in its words."""

import re

import exchange_jobs
import pytest
import torch
from engine_ranks import run_ranks

from moerl.cluster.error_texts import is_consequence


@pytest.mark.parametrize(("num_ranks", "seed"), [(2, 0), (2, 1), (3, 2), (4, 3)])
def test_exchanges_through_memory_bring_what_gloo_brings(num_ranks, seed):
    (through, ours), (not_through, theirs) = (
        run_ranks(exchange_jobs.exchange_many, num_ranks, seed, 30, without=without) for without in ([], ["shared_exchange"])
    )
    assert (through, not_through) == (True, False)
    assert sum(len(tensor) for tensor in theirs) > 0
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(ours, theirs, strict=True))


def test_a_rank_that_reads_late_reads_what_was_sent():
    assert run_ranks(exchange_jobs.exchange_slowly, 3, 0.05) == [number for number in range(8) for _ in range(3)]


@pytest.mark.parametrize("what", ["reach", "files"])
def test_ranks_of_which_one_is_on_another_host_or_may_open_no_more_files_exchange_over_gloo(what):
    through, received = run_ranks(exchange_jobs.exchange_many, 3, 5, 10, (1, what))
    _, theirs = run_ranks(exchange_jobs.exchange_many, 3, 5, 10, without=["shared_exchange"])
    assert not through
    assert all(torch.equal(a, b) for a, b in zip(received, theirs, strict=True))


@pytest.mark.parametrize("without", [[], ["shared_exchange"]])
def test_sizes_that_are_not_those_of_the_tensors_are_refused_as_by_gloo(without):
    assert run_ranks(exchange_jobs.refused_sizes, 2, without=without) == (not without, ["RuntimeError"] * 4)


@pytest.mark.parametrize(
    ("ends", "words"), [(True, "Connection closed by peer|Broken pipe"), (False, "Timed out waiting 1000ms for rank 1")]
)
def test_a_rank_that_lost_another_says_so_as_gloo_would(ends, words, tmp_path):
    error = run_ranks(exchange_jobs.lose_a_rank, 1, str(tmp_path / "store"), ends, 1.0)
    assert re.search(words, error)
    assert is_consequence(RuntimeError(error))


def test_a_group_that_is_destroyed_leaves_no_files():
    during, after = run_ranks(exchange_jobs.files_of_a_destroyed_group, 2)
    assert (during, after) == (4, 0)


def test_ranks_exchange_nothing_while_their_groups_are_ended():
    error = "communication in the group of ranks [0, 1] while the trainer sleeps: its groups are ended"
    assert run_ranks(exchange_jobs.exchange_while_ended, 2) == (True, error, [0.0, 1.0])


def test_exchanges_through_memory_are_on_the_record():
    assert run_ranks(exchange_jobs.recorded_exchanges, 2) == (True, "all_to_all_single", [5])  # and two of the first, to meet
