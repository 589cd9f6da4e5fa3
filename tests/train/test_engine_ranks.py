"""What the tests of the engine rely on: a rank's failure arrives as it was, in bounded time, and leaves nothing behind."""

import subprocess
import time

import pytest
from engine_jobs import die_on_rank, fail_on_rank, process_group, wait_for_ever_on_rank
from engine_ranks import RankError, run_ranks


def processes_of_group(group):
    listing = subprocess.run(["ps", "-eo", "pgid=,stat="], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listing.splitlines()]
    return sum(int(pgid) == group and not state.startswith("Z") for pgid, state in rows)


def assert_only_the_server_is_left():
    assert processes_of_group(run_ranks(process_group, 2)) == 1


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
