"""What the accounting says has left the GPU has left it, by CUDA's own allocator; and the numbers stay.

Written against the same engine as the CPU tests; not run on a GPU so far (docs/design/memory.md, "Residency").
"""

import importlib.util

import numpy as np
import pytest
import torch
from device_ranks import run
from engine_cases import random_batch, settings
from memory_jobs import with_train

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


def reports(model_dir, num_ranks, *, sleeps, **changes):
    """Of rank 0, one for each of three steps."""
    has_real = importlib.util.find_spec("transformer_engine") is not None
    chosen = with_train(settings(model_dir, Layout(ranks=num_ranks, ep=num_ranks), dtype="bfloat16"), **changes)
    return run("residency_jobs:three_steps", num_ranks, chosen, random_batch(), sleeps, reference_te=not has_real)


def test_memory_that_left_is_free_and_what_stays_is_what_the_accounting_says(model_dir):
    for offload in ("optimizer", "all"):
        *_, report = reports(model_dir, 1, offload=offload, sleeps=True)
        bytes_in = {state: sum(kinds.values()) for state, kinds in report["stats"].memory.device_bytes.items()}
        for first, second in (("training", "scoring"), ("training", "asleep")):
            dropped = report[first]["allocated"] - report[second]["allocated"]
            assert dropped == pytest.approx(bytes_in[first] - bytes_in[second], rel=ROUNDING)
        if offload == "all":
            assert report["asleep"]["allocated"] < ROUNDING * report["training"]["allocated"]


def test_sleeping_changes_no_number(model_dir):
    stays = reports(model_dir, 1, sleeps=False)
    sleeps = reports(model_dir, 1, offload="all", destroy_groups=True, sleeps=True)
    for one, other in zip(stays, sleeps, strict=True):
        np.testing.assert_allclose(one["before_T"], other["before_T"], atol=1e-2)
        assert one["stats"].grad_norm == pytest.approx(other["stats"].grad_norm, rel=1e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: a group of one rank has no communicator")
def test_ended_communicators_give_their_memory_back(model_dir):
    """Free memory of the device, since NCCL's buffers are not the allocator's."""
    kept = reports(model_dir, 2, offload="all", sleeps=True)[-1]
    ended = reports(model_dir, 2, offload="all", destroy_groups=True, sleeps=True)[-1]
    assert ended["asleep"]["free"] > kept["asleep"]["free"]
    assert ended["stats"].grad_norm == pytest.approx(kept["stats"].grad_norm, rel=1e-2)
