"""Memory that leaves between phases changes no bit, is really gone, and calls that need it are refused."""

import numpy as np
import pytest
import torch
from engine_cases import LAYOUTS, random_batch, settings
from engine_ranks import RankError, run_ranks
from hypothesis import given
from hypothesis import strategies as st
from memory_jobs import (
    bytes_by_state,
    call_asleep,
    equal,
    fp8_copies_by_state,
    groups_asleep,
    save_and_continue,
    save_in_place,
    train_in_phases,
    update_asleep,
    with_train,
)

from moerl.config.schema.layout import Layout
from moerl.train.memory.blocks import Block, pieces


def case(checkpoints, layout=None, *, dtype="float32", **changes):
    chosen = settings(checkpoints["qwen3_moe"], Layout() if layout is None else LAYOUTS[layout], dtype=dtype, uses_reference=True)
    return with_train(chosen, **changes)


ALL = {"offload": "all", "destroy_groups": True}


@pytest.mark.parametrize(
    ("layout", "dtype", "changes"),
    [
        (None, "bfloat16", {"offload": "optimizer"}),
        ("dp2", "float32", {"offload": "all"}),
        ("tp2-ep2", "bfloat16", ALL),
        pytest.param("pp2-vpp2", "float32", ALL, marks=pytest.mark.matrix),
        pytest.param("tp2-ep2-dp2", "bfloat16", ALL, marks=pytest.mark.matrix),
        pytest.param("tp2-cp2", "float32", ALL, marks=pytest.mark.matrix),
        ("dp2", "bfloat16", ALL | {"overlap_grad_reduce": True, "overlap_param_gather": True, "overlap_bucket_size": 3000}),
    ],
)
def test_sleeping_between_phases_changes_no_bit(layout, dtype, changes, checkpoints):
    ranks = 1 if layout is None else LAYOUTS[layout].ranks
    stays = case(checkpoints, layout, dtype=dtype, **{k: v for k, v in changes.items() if k.startswith("overlap")})
    awake = run_ranks(train_in_phases, ranks, stays, random_batch(), False)
    equal(run_ranks(train_in_phases, ranks, case(checkpoints, layout, dtype=dtype, **changes), random_batch(), True), awake)


def test_a_checkpoint_is_saved_and_loaded_between_sleeps(checkpoints, tmp_path):
    straight, again = run_ranks(save_and_continue, 2, case(checkpoints, "ep2", dtype="bfloat16", **ALL), random_batch(), tmp_path, True)
    assert straight[0] == again[0]
    np.testing.assert_array_equal(straight[1], again[1])


def test_a_checkpoint_written_from_the_devices_own_memory_lets_it_sleep_afterwards(checkpoints, tmp_path):
    before_T, after_T = run_ranks(save_in_place, 2, case(checkpoints, "dp2", **ALL), random_batch(), tmp_path)
    np.testing.assert_array_equal(before_T, after_T)


# -- accounting ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offload", ["none", "optimizer", "all"])
def test_what_leaves_is_released_and_what_the_statistics_say_is_there(offload, checkpoints):
    memory, awake, asleep = run_ranks(bytes_by_state, 1, case(checkpoints, dtype="bfloat16", offload=offload), random_batch())
    gone = {"none": (), "optimizer": ("gradients", "moments"), "all": tuple(awake)}[offload]
    assert asleep == {name: 0 if name in gone else size for name, size in awake.items()}
    training = memory.device_bytes["training"]
    assert {kind: training[kind] for kind in ("parameters", "gradients", "reference")} == {
        kind: awake[kind] for kind in ("parameters", "gradients", "reference")
    }
    # bfloat16 parameters, float32 gradients, master weights and two moments; buffers and shards are padded.
    assert training["gradients"] == 2 * training["parameters"]
    assert training["optimizer"] == pytest.approx(6 * training["reference"], rel=0.01)
    states = {"training"} if offload == "none" else {"training", "scoring", "asleep"}
    assert memory.device_bytes.keys() == states
    if offload != "none":
        weights = {**training, "gradients": 0, "optimizer": 0}
        assert memory.device_bytes["scoring"] == weights
        assert memory.device_bytes["asleep"] == (weights if offload == "optimizer" else dict.fromkeys(training, 0))
        assert memory.host_bytes["optimizer"] == training["optimizer"]
        assert memory.host_bytes["gradients"] == 0
    if offload == "all":
        assert memory.host_bytes["parameters"] == training["parameters"]
        assert memory.transition_seconds.keys() == {"scoring_to_training", "training_to_asleep", "asleep_to_scoring"}


@pytest.mark.parametrize(("offload", "kept"), [("none", [True, True]), ("optimizer", [False, True]), ("all", [False, False])])
def test_copies_of_weights_in_fp8_leave_with_what_leaves(offload, kept, checkpoints):
    found = run_ranks(fp8_copies_by_state, 1, case(checkpoints, offload=offload), random_batch())
    assert found == [("training", True), ("scoring", kept[0]), ("scoring", True), ("asleep", kept[1])]


def test_a_block_left_twice_and_brought_back_twice_holds_what_it_held():
    block = Block((tensor := torch.arange(6.0)).untyped_storage(), is_kept=True)
    view, shard = tensor[2:4], tensor.view(2, 3)
    for _ in range(2):
        block.leave()
        block.leave()
        assert (block.device_bytes, block.host_bytes, tensor.untyped_storage().nbytes()) == (0, 24, 0)
        block.come_back()
        block.come_back()
        assert (block.device_bytes, block.host_bytes) == (24, 24)
        assert tensor.tolist() == [0, 1, 2, 3, 4, 5] and view.tolist() == [2, 3] and shard[1].tolist() == [3, 4, 5]


def test_a_block_that_is_not_kept_comes_back_as_zeros_without_a_copy():
    block = Block((tensor := torch.ones(3)).untyped_storage(), is_kept=False)
    block.leave()
    block.come_back()
    assert tensor.tolist() == [0, 0, 0] and block.host_bytes == 0


@given(st.integers(0, 2**40))
def test_host_copies_waste_less_than_a_mebibyte_when_each_is_rounded_up_to_a_power_of_two(num_bytes):
    sizes = list(pieces(num_bytes))
    assert sum(sizes) == num_bytes and len(sizes) <= 22
    assert sum(1 << (size - 1).bit_length() for size in sizes) - num_bytes < 2**20


def test_a_block_comes_back_from_several_pieces():
    tensor = torch.randint(0, 256, (5 * 2**20 + 3,), dtype=torch.uint8)
    before, block = tensor.clone(), Block(tensor.untyped_storage(), is_kept=True)
    block.leave()
    assert block.host_bytes == len(before)
    block.come_back()
    assert torch.equal(tensor, before)


# -- refusals ------------------------------------------------------------------------------------------------------


def test_calls_that_the_state_does_not_allow_are_refused_with_the_state_the_call_and_the_legal_calls(checkpoints):
    said = run_ranks(call_asleep, 1, case(checkpoints, offload="all"), random_batch())
    for call in ("sleep", "logprobs", "update", "export", "save", "load"):
        assert said[call] == f"{call}: the trainer is asleep; legal now: wake"
    legal = "shed, sleep, logprobs, reference_logprobs, values, export, update, save, load"
    assert said["wake awake"] == f"wake: the trainer is training; legal now: {legal}"
    assert said["sleep exporting"] == "sleep: the trainer is scoring, running export; no call is legal before export has ended"
    assert said["update exporting"] == "update: the trainer is scoring, running export; no call is legal before export has ended"
    assert said["logprobs awake"] == "accepted"


def test_the_same_calls_are_refused_where_nothing_is_offloaded(checkpoints):
    """So that a wrong order shows in every run, not only in those that are short of memory."""
    said = run_ranks(call_asleep, 1, case(checkpoints), random_batch())
    assert said["update"] == "update: the trainer is asleep; legal now: wake"


# -- groups --------------------------------------------------------------------------------------------------------


def test_groups_are_ended_asleep_and_made_again(checkpoints):
    awake, asleep, again, said = run_ranks(groups_asleep, 2, case(checkpoints, "tp2", **ALL))
    assert awake == again > 5
    assert asleep == 1  # the default group
    assert said == "communication in the group of ranks [0, 1] while the trainer sleeps: its groups are ended"


def test_a_wrong_order_of_sleep_and_collective_is_an_error_of_the_rank(checkpoints):
    with pytest.raises(RankError, match="ResidencyError: update: the trainer is asleep"):
        run_ranks(update_asleep, 2, case(checkpoints, "dp2", **ALL), random_batch())
