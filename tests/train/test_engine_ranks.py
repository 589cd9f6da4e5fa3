"""What the tests of the engine rely on: a rank's failure arrives as it was, in bounded time, and leaves nothing behind."""

import pickle
import subprocess
import time

import pytest
import torch
from engine_jobs import die_on_rank, fail_on_rank, leave_a_child_behind, loaded, session, wait_for_ever_on_rank, zeros
from engine_ranks import RankError, _Server, run_ranks

import megatron_patches


def processes_of_session(session):
    listing = subprocess.run(["ps", "-eo", "sess=,stat=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(maxsplit=2) for line in listing.splitlines()]
    return [args for sid, state, args in rows if int(sid) == session and not state.startswith("Z")]


def assert_only_the_server_is_left():
    left = processes_of_session(run_ranks(session, 2))
    assert len(left) == 1, left


def test_ranks_need_not_import_megatron_each():
    """Which is most of what a case would cost."""
    names = ["megatron.core", "moerl.train.megatron_engine", "moerl.train.megatron.megatron_model", "torch._dynamo"]
    without = tuple(patch.NAME for patch in megatron_patches.PATCHES)  # they import Megatron too
    server = _Server()
    try:
        succeeded, value = server.ask(("", loaded, 1, (names,), without, 60.0), 120.0)
    finally:
        server.close()
    assert succeeded and pickle.loads(value) == names


def test_the_traceback_of_the_failing_rank_arrives_although_another_rank_waits_for_it():
    with pytest.raises(RankError, match=r"rank 1:\n(?s:.*)in fail_on_rank\n(?s:.*)ZeroDivisionError"):
        run_ranks(fail_on_rank, 3, 1)
    assert_only_the_server_is_left()


def test_a_rank_that_dies_is_named():
    with pytest.raises(RankError, match="rank 1 died without a word"):
        run_ranks(die_on_rank, 2, 1)
    assert_only_the_server_is_left()


def test_ranks_that_do_not_finish_are_named_and_ended():
    started = time.monotonic()
    with pytest.raises(RankError, match=r"ranks \[0, 1\] did not finish in time"):
        run_ranks(wait_for_ever_on_rank, 2, 0, deadline_seconds=1.5)
    assert time.monotonic() - started < 30
    assert_only_the_server_is_left()


def test_what_a_rank_started_ends_with_it():
    with pytest.raises(RankError, match="ZeroDivisionError"):
        run_ranks(leave_a_child_behind, 2, 0)
    assert_only_the_server_is_left()


def test_a_tensor_arrives_although_its_rank_is_gone():
    assert run_ranks(zeros, 2, 3).equal(torch.zeros(3))
