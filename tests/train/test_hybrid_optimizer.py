"""The optimizer that keeps a part of its states in host memory, with a trainer that sleeps."""

from dataclasses import replace

import numpy as np
import pytest
from engine_cases import LAYOUTS, random_batch, settings
from engine_ranks import run_ranks
from hybrid_jobs import hybrid_from_checkpoint, hybrid_in_a_new_engine, hybrid_in_phases, hybrid_sizes
from memory_jobs import equal, with_train

from moerl.config.schema.train_config import OptimizerMemory

HALF = OptimizerMemory(cpu_fraction=0.5, precision_aware=True, cpu_overlap=True)
WHOLE = OptimizerMemory(cpu_fraction=1.0, precision_aware=True)


def case(checkpoints, memory, **changes):
    chosen = settings(checkpoints["qwen3_moe"], LAYOUTS["ep2"], dtype="bfloat16", uses_reference=True)
    return with_train(chosen, optimizer=replace(chosen.train.optimizer, memory=memory), **changes)


@pytest.mark.parametrize("memory", [HALF, pytest.param(WHOLE, marks=pytest.mark.matrix)], ids=["half", "whole"])
def test_sleeping_between_phases_changes_no_bit(memory, checkpoints):
    awake = run_ranks(hybrid_in_phases, 2, case(checkpoints, memory), random_batch(), False)
    equal(run_ranks(hybrid_in_phases, 2, case(checkpoints, memory, offload="all", destroy_groups=True), random_batch(), True), awake)


def test_what_is_on_the_gpu_leaves_and_what_is_on_the_host_stays(checkpoints):
    awake, asleep, again = run_ranks(hybrid_sizes, 2, case(checkpoints, HALF, offload="all"), random_batch())
    assert all(awake.values()) and again == awake
    assert asleep == {name: size if name.endswith("on the host") else 0 for name, size in awake.items()}


def test_a_checkpoint_continues_as_if_nothing_had_happened(checkpoints, tmp_path):
    straight, again = run_ranks(hybrid_from_checkpoint, 2, case(checkpoints, HALF, offload="all"), random_batch(), tmp_path)
    anew = run_ranks(hybrid_in_a_new_engine, 2, case(checkpoints, HALF), random_batch(), tmp_path)
    assert straight[0] == again[0] == anew[0]
    np.testing.assert_array_equal(straight[1], again[1])
    np.testing.assert_array_equal(straight[1], anew[1])
