"""Memory that leaves between phases changes no bit, is really gone, and calls that need it are refused."""

import pytest
from engine_cases import LAYOUTS, random_batch, settings
from engine_ranks import RankError, run_ranks
from memory_jobs import bytes_by_state, call_asleep, equal, groups_asleep, save_asleep_between, train_in_phases, with_train

from moerl.config.layout import Layout
from moerl.config.memory import OptimizerMemory


def case(checkpoints, layout=None, *, dtype="float32", **changes):
    chosen = settings(checkpoints["qwen3_moe"], Layout() if layout is None else LAYOUTS[layout], dtype=dtype, uses_reference=True)
    return with_train(chosen, **changes)


ALL = {"offload": "all", "destroy_groups": True}


@pytest.mark.parametrize(
    ("layout", "dtype", "changes"),
    [
        (None, "bfloat16", {"offload": "optimizer"}),
        ("dp2", "float32", {"offload": "all"}),
        ("tp2-ep2-dp2", "bfloat16", ALL),
        ("pp2-vpp2", "float32", ALL),
        pytest.param("tp2-cp2", "float32", ALL, marks=pytest.mark.slow),
        ("dp2", "bfloat16", ALL | {"overlap_grad_reduce": True, "overlap_param_gather": True, "overlap_bucket_size": 3000}),
    ],
)
def test_sleeping_between_phases_changes_no_bit(layout, dtype, changes, checkpoints):
    ranks = 1 if layout is None else LAYOUTS[layout].ranks
    stays = case(checkpoints, layout, dtype=dtype, **{k: v for k, v in changes.items() if k.startswith("overlap")})
    awake = run_ranks(train_in_phases, ranks, stays, random_batch(), False)
    equal(run_ranks(train_in_phases, ranks, case(checkpoints, layout, dtype=dtype, **changes), random_batch(), True), awake)
