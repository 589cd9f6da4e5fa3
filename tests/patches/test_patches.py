"""Every patch is needed, is in force, refuses code it was not written for, and says so when it comes too late."""

import os
import re
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_cases import LAYOUTS, random_batch, settings
from engine_jobs import first_step, train
from engine_ranks import RankError, run_ranks
from patch_jobs import activate_again, gather_and_scatter, patch_changed_source, rng_round_trip, undo, use_cuda_names

import megatron_patches
from megatron_patches import duplicated_linear, lone_rank, reference_te
from megatron_patches.errors import PatchError, require_source
from moerl.config.schema.layout import Layout

OLD_MEGATRON = pytest.param(
    "duplicated_linear", marks=pytest.mark.skipif(not duplicated_linear.needed(), reason="this version of Megatron marks them itself")
)
ROOT = Path(megatron_patches.__file__).resolve().parent.parent

BUILD_AN_ENGINE = """
import sys, megatron_patches
megatron_patches.PATCHES = tuple(patch for patch in megatron_patches.PATCHES if patch.NAME != sys.argv[1])
megatron_patches.activate()
import torch.distributed as dist
from pathlib import Path
from engine_cases import settings
from engine_jobs import new_engine
from moerl.config.schema.layout import Layout
dist.init_process_group("gloo", init_method="file://" + sys.argv[3], rank=0, world_size=1)
new_engine(settings(Path(sys.argv[2]), Layout()))
"""
ON_A_GPU = """
import sys, torch, megatron_patches
torch.cuda.is_available = lambda: True
megatron_patches.PATCHES = ()  # the others import Megatron, which would use the GPU
megatron_patches.activate(with_reference=sys.argv[1] == "reference")
assert megatron_patches.reference_te.active()
"""
ACTIVATE_TOO_LATE = """
import megatron.core, megatron_patches
try:
    megatron_patches.assert_active()
finally:
    megatron_patches.activate()
"""


def last_error(program, *args):
    """What a new interpreter said last, or nothing if it ended well; and all it said."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "train")])
    command = [sys.executable, "-W", "ignore", "-c", program, *map(str, args)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": path})
    return ("" if ended.returncode == 0 else ended.stderr.strip().splitlines()[-1]), ended.stderr


# -- needed --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("without", "error"),
    [
        ("cuda_stand_in", "CUDA|NVIDIA"),
        ("reference_te", "NameError: name 'TE.*' is not defined|'NoneType' object is not callable|duplicated_linear: unittest.mock"),
    ],
)
def test_an_engine_needs_a_stand_in_for_cuda_and_for_transformer_engine(without, error, checkpoints, tmp_path):
    last, everything = last_error(BUILD_AN_ENGINE, without, checkpoints["qwen3_moe"], tmp_path / "store")
    assert re.search(error, last), everything


def test_on_a_gpu_the_reference_of_transformer_engine_serves_only_if_it_is_asked_for():
    last, _ = last_error(ON_A_GPU, "real")
    assert last.startswith(
        "megatron_patches.errors.PatchError: Transformer Engine cannot be imported, and this process has a GPU: No module"
    )
    assert last.endswith("train.reference_te=true")
    last, everything = last_error(ON_A_GPU, "reference")
    assert (last, "runs on the slow PyTorch reference" in everything) == ("", True), everything


@pytest.mark.parametrize(
    ("patch", "layout", "error"),
    [
        ("alltoall_splits", "ep2", r"TypeError: all_to_all_single\(\): incompatible function arguments"),
        ("uneven_gloo", "tp2-ep2-etp2-dp2", "RuntimeError: ProcessGroupGloo.*invalid tensor size"),
    ],
)
def test_a_layout_fails_without_its_patch(patch, layout, error, checkpoints):
    chosen = settings(checkpoints["qwen3_moe"], LAYOUTS[layout])
    with pytest.raises(RankError, match=error):
        run_ranks(first_step, chosen.train.layout.ranks, chosen, random_batch(), without=[patch, "shared_exchange"], deadline_seconds=30)


def test_float64_fails_without_its_patch(checkpoints):
    chosen = settings(checkpoints["qwen3_moe"], Layout(), dtype="float64")
    with pytest.raises(RankError, match="attempting to assign a gradient with dtype 'float'"):
        run_ranks(first_step, 1, chosen, random_batch(), without=["float64_gradients"])


def test_a_lone_rank_trains_to_the_same_bits_without_its_patch(checkpoints):
    chosen = settings(checkpoints["qwen3_moe"], Layout())
    ours, gloo = (run_ranks(train, 1, chosen, random_batch(), 2, 1, without=without) for without in ([], ["lone_rank"]))
    assert all(ours.weights[name].tobytes() == values.tobytes() for name, values in gloo.weights.items())
    assert ours.steps == [replace(step, memory=ours.steps[i].memory) for i, step in enumerate(gloo.steps)]


@pytest.mark.parametrize(("num_ranks", "other_memory", "is_called"), [(1, False, False), (1, True, True), (2, False, True)])
def test_only_a_collective_of_one_rank_in_place_is_left_out(num_ranks, other_memory, is_called):
    values, calls = torch.ones(4), []
    collective = lone_rank._unless_alone(lambda *args, **options: calls.append((args, options)))
    output, group = (values.clone() if other_memory else values[:4]), types.SimpleNamespace(size=lambda: num_ranks)
    collective(output, values, group=group, async_op=True)
    assert calls == [((output, values), {"group": group, "async_op": True})] * is_called


# -- in force ------------------------------------------------------------------------------------------------------


def test_activating_again_changes_nothing():
    is_same, names, needed = run_ranks(activate_again, 1)
    assert is_same
    assert names == needed


@pytest.mark.parametrize("patch", ["cuda_stand_in", "alltoall_splits", "uneven_gloo", "lone_rank", OLD_MEGATRON])
def test_a_patch_that_was_undone_is_named(patch):
    with pytest.raises(RankError, match=rf"in undo\n(?s:.*)PatchError: patches not in force: {patch};"):
        run_ranks(undo, 1, patch)


def test_activating_after_megatron_was_imported_is_an_error():
    last, everything = last_error(ACTIVATE_TOO_LATE)
    assert "PatchError: patches not in force: cuda_stand_in, reference_te" in everything
    assert last.startswith("RuntimeError: megatron_patches.activate() must run before megatron.core is imported")


def test_a_transformer_engine_that_was_imported_before_is_not_replaced(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", types.ModuleType("transformer_engine"))
    with pytest.raises(RuntimeError, match="transformer_engine was imported before"):
        reference_te.apply()


# -- for the code they were written for ------------------------------------------------------------------------------


def test_a_function_with_another_source_is_refused_with_its_name_and_the_known_versions():
    with pytest.raises(PatchError) as error:
        require_source(last_error, {"0123456789abcdef": "megatron-core 0.16.1"}, "some_patch")
    message = str(error.value)
    assert f"some_patch: {__name__}.last_error has changed (source digest " in message
    assert "this patch knows megatron-core 0.16.1" in message
    digest = re.search(r"digest ([0-9a-f]{16});", message).group(1)
    require_source(last_error, {"0123456789abcdef": "1.0", digest: "2.0"}, "some_patch")


@pytest.mark.parametrize(
    ("patch", "target"),
    [
        ("alltoall_splits", "alltoall_splits"),
        ("uneven_gloo", "_gather_along_first_dim"),
        ("uneven_gloo", "_reduce_scatter_along_first_dim"),
        ("duplicated_linear", "duplicated_linear"),
    ],
)
def test_a_patch_refuses_a_target_that_has_changed(patch, target):
    with pytest.raises(RankError, match=rf"PatchError: {patch}: patch_jobs._another has changed .*megatron_patches/{patch}.py"):
        run_ranks(patch_changed_source, 1, target, without=["alltoall_splits", "uneven_gloo"])


# -- right ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[1, 3], [2, 0, 5], [2, 2]])
def test_uneven_pieces_are_gathered_in_order_and_reduced_to_their_owners(sizes):
    num_ranks = len(sizes)
    whole = torch.cat([torch.full((size, 2), float(rank)) for rank, size in enumerate(sizes)])
    factor = sum(range(1, num_ranks + 1))
    for rank, (gathered, scattered) in enumerate(run_ranks(gather_and_scatter, num_ranks, sizes)):
        assert gathered.equal(whole)
        assert scattered.equal(whole.split(sizes)[rank] * factor)


def test_everything_that_asks_for_cuda_gets_the_cpu():
    answer = run_ranks(use_cuda_names, 1)
    assert answer["devices"] == {"cpu"}
    assert answer["dtype"] == torch.float64
    assert answer["event"] is True
    assert answer["is_available"] is False
    assert (answer["type"], answer["type_in_megatron"]) == ("torch.FloatTensor", "torch.cuda.FloatTensor")


def test_the_random_state_of_cuda_is_that_of_the_cpu():
    assert run_ranks(rng_round_trip, 1)


def test_ranks_leave_the_process_that_asks_for_them_as_it_is():
    """Not patched, unless a test before this one did that."""
    modules = ("transformer_engine", "megatron.core")
    before = megatron_patches.active_names(), [name in sys.modules for name in modules]
    run_ranks(rng_round_trip, 1)
    assert (megatron_patches.active_names(), [name in sys.modules for name in modules]) == before


def test_asking_which_patches_are_in_force_imports_nothing():
    """A process that asked would have Megatron unpatched, and could not patch it any more."""
    code = "import sys, megatron_patches; print(megatron_patches.active_names(), 'megatron.core' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "() False\n"
