"""What the accounting says has left the GPU has left it, by CUDA's own allocator; and the numbers stay.

Written against the same engine as the CPU tests; not run on a GPU so far (docs/design/memory.md, "Residency").
"""

import importlib.util

import numpy as np
import pytest
import torch
from engine_cases import random_batch, settings
from memory_jobs import with_train
from residency_ranks import run

from moerl.config.schema.layout import Layout
from moerl.config.schema.model_config import ScratchModel
from moerl.scratch_model import write_scratch_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
ROUNDING = 0.02
"""The allocator rounds every block up; the model is large enough for that to be little."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """About 60 million parameters."""
    directory = tmp_path_factory.mktemp("model") / "qwen3_moe"
    shape = ScratchModel(hidden_size=512, num_layers=4, num_heads=8, num_kv_heads=4, head_dim=64, ffn_size=1024, num_experts=8)
    write_scratch_model(shape, 32, directory, seed=0)
    return directory


def case(model_dir, num_ranks, **changes):
    changes["reference_te"] = importlib.util.find_spec("transformer_engine") is None
    return with_train(settings(model_dir, Layout(ranks=num_ranks, ep=num_ranks), dtype="bfloat16"), **changes)


def test_memory_that_left_is_free_and_what_stays_is_what_the_accounting_says(model_dir):
    for offload in ("optimizer", "all"):
        *_, report = run(case(model_dir, 1, offload=offload), random_batch(), num_ranks=1, sleeps=True)
        bytes_in = {state: sum(kinds.values()) for state, kinds in report["stats"].memory.device_bytes.items()}
        for first, second in (("training", "scoring"), ("training", "asleep")):
            dropped = report[first]["allocated"] - report[second]["allocated"]
            assert dropped == pytest.approx(bytes_in[first] - bytes_in[second], rel=ROUNDING)
        if offload == "all":
            assert report["asleep"]["allocated"] < ROUNDING * report["training"]["allocated"]


def test_sleeping_changes_no_number(model_dir):
    stays = run(case(model_dir, 1), random_batch(), num_ranks=1, sleeps=False)
    sleeps = run(case(model_dir, 1, offload="all", destroy_groups=True), random_batch(), num_ranks=1, sleeps=True)
    for one, other in zip(stays, sleeps, strict=True):
        np.testing.assert_allclose(one["before_T"], other["before_T"], atol=1e-2)
        assert one["stats"].grad_norm == pytest.approx(other["stats"].grad_norm, rel=1e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: a group of one rank has no communicator")
def test_ended_communicators_give_their_memory_back(model_dir):
    """Free memory of the device, since NCCL's buffers are not the allocator's."""
    kept = run(case(model_dir, 2, offload="all"), random_batch(), num_ranks=2, sleeps=True)[-1]
    ended = run(case(model_dir, 2, offload="all", destroy_groups=True), random_batch(), num_ranks=2, sleeps=True)[-1]
    assert ended["asleep"]["free"] > kept["asleep"]["free"]
    assert ended["stats"].grad_norm == pytest.approx(kept["stats"].grad_norm, rel=1e-2)
