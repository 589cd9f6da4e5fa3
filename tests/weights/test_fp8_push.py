"""A push in FP8 from real training workers: what arrives is what converting the whole export gives, and half the bytes cross."""

import dataclasses

import push_ranks
import pytest
from engine_cases import LAYOUTS, settings
from engine_ranks import run_ranks

from moerl.config.schema.model_config import ScratchModel
from moerl.scratch_model import write_scratch_model

ODD = ScratchModel(family="qwen3_moe", hidden_size=192, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=44, ffn_size=136, num_experts=4)
EVEN = dataclasses.replace(ODD, hidden_size=256, head_dim=128, ffn_size=256)
"""Shards over two ranks are whole blocks."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("fp8")
    for name, model in (("odd", ODD), ("even", EVEN)):
        write_scratch_model(model, 32, root / name, seed=0)
    return {name: root / name for name in ("odd", "even")}


@pytest.mark.parametrize(
    ("model", "layout", "gathers", "scales", "num_exchanges"),
    [
        ("odd", "tp2-etp2", False, "ue8m0", 2), ("odd", "ep2", False, "ue8m0", 0), ("odd", "tp2-ep2", False, "float32", 1),
        ("even", "tp2-etp2", False, "float32", 0), ("odd", "tp2-etp2", True, "float32", 0),
    ],
)  # fmt: skip
def test_what_arrives_is_the_whole_tensor_in_blocks(models, model, layout, gathers, scales, num_exchanges):
    chosen = dataclasses.replace(settings(models[model], LAYOUTS[layout], dtype="bfloat16"), push_fp8=scales)
    pushed, expected, counted, sent = run_ranks(push_ranks.fp8_pushed_and_expected, LAYOUTS[layout].ranks, chosen, gathers)
    assert pushed == expected
    assert sum(name.endswith("_scale_inv") for name in pushed) == 2 * (4 + 4 * 3)
    assert counted == num_exchanges  # one for each group of ranks that share blocks
    in_fp8, in_bfloat16 = sent
    assert in_fp8 < 0.6 * in_bfloat16  # the embeddings stay in bfloat16


def test_a_run_plans_fp8_with_the_tensors_that_moerl_plan_prints(models):
    chosen = dataclasses.replace(settings(models["odd"], LAYOUTS["tp2-ep2"], dtype="bfloat16"), push_fp8="float32")
    of_run, of_plan = run_ranks(push_ranks.outlines, 2, chosen)
    assert {tensor.spec.dtype for tensor in of_run} == {"float8_e4m3fn", "float32", "bfloat16"}
    assert of_run == of_plan
