"""A rank that records what it does communicates as one that does not."""

import progress_jobs
from engine_cases import LAYOUTS, random_batch, settings
from engine_jobs import first_step
from engine_ranks import run_ranks


def test_ranks_that_record_send_to_each_other():
    assert run_ranks(progress_jobs.exchange, 2) == [1.0, 1.0]


def test_a_collective_that_raises_is_left():
    assert run_ranks(progress_jobs.refused, 1) == ("all_reduce", 0, 1)


def test_pipeline_stages_that_record_train_as_those_that_do_not(checkpoints):
    chosen = settings(checkpoints["qwen3_moe"], LAYOUTS["pp2"])
    assert run_ranks(progress_jobs.first_step, 2, chosen, random_batch()) == run_ranks(first_step, 2, chosen, random_batch())
