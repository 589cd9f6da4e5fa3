"""mbridge as the oracle of the native bridge: both load the same parameters and export the same tensors, under every kind of layout."""

import dataclasses
import importlib.util
import re
from functools import partial

import pytest
import torch
from bridge_jobs import build_engine, differences, group_limits
from engine_cases import settings
from engine_ranks import RankError
from engine_ranks import run_ranks as run_plain_ranks
from family_cases import CASES, write_case
from safetensors.torch import load_file, save_file

from moerl.config.schema.layout import Layout
from moerl.models.bridge_packages import BRIDGES

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mbridge") is None, reason="mbridge is not installed (pip install 'moerl[mbridge]')"
)

NAMES = tuple(name for name, config in CASES.items() if config["model_type"] in BRIDGES["mbridge"].families)
SPARSE = tuple(name for name in NAMES if any("expert" in key for key in CASES[name]))
LAYOUTS = {
    "one": (Layout(), NAMES),
    "tp2-pp2": (Layout(ranks=4, tp=2, pp=2, etp=2), NAMES),
    "tp2-etp1-ep2-pp2": (Layout(ranks=4, tp=2, pp=2, ep=2), SPARSE),
    "tp2-pp2-ep2-etp2": (Layout(ranks=8, tp=2, pp=2, ep=2, etp=2), SPARSE),
    "pp2-vpp2": (Layout(ranks=2, pp=2, vpp=2), ("qwen3_moe", "qwen2-tied")),
}
run_ranks = partial(run_plain_ranks, imports="mbridge")
"""Its import is two seconds of every rank."""


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("mbridge")
    return {name: write_case(name, root) for name in NAMES}


ALWAYS = ("one", "tp2-etp1-ep2-pp2", "pp2-vpp2")


@pytest.mark.parametrize("layout", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.matrix) for name in LAYOUTS])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.matrix)])
def test_both_bridges_load_and_export_the_same(layout, dtype, directories):
    sizes, names = LAYOUTS[layout]
    chosen = [settings(directories[name], sizes, dtype=dtype) for name in names]
    found = run_ranks(differences, sizes.ranks, chosen, "mbridge")
    assert dict(zip(names, found, strict=True)) == {name: [] for name in names}


def test_every_family_that_is_allowed_is_compared():
    assert {CASES[name]["model_type"] for name in NAMES} == set(BRIDGES["mbridge"].families)


def under_mbridge(directory, layout):
    chosen = settings(directory, layout)
    return dataclasses.replace(chosen, train=dataclasses.replace(chosen.train, bridge="mbridge"))


def test_the_group_limit_that_mbridge_leaves_out_is_in_the_model(directories):
    theirs, ours = run_ranks(group_limits, 1, under_mbridge(directories["deepseek_v3"], Layout()))
    assert theirs == (None, None), "mbridge knows the limit now: its configuration need not be dropped for this reason any more"
    assert ours == (4, 2)


@pytest.mark.parametrize(
    ("patch", "error"),
    [
        ("mbridge_rope_theta", "AttributeError: .* has no attribute 'rope_theta'"),
        ("mbridge_latent_config", "TypeError: .* unexpected keyword argument 'max_position_embeddings'"),
        ("mbridge_deepseek_weights", "TypeError: 'NotImplementedType' object is not callable"),
    ],
)
def test_a_patch_of_mbridge_is_needed(patch, error, directories):
    with pytest.raises(RankError, match=error):
        run_ranks(build_engine, 1, under_mbridge(directories["deepseek_v3"], Layout()), without=[patch])


def changed(directory, tmp_path, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def test_every_absent_tensor_is_named(directories, tmp_path):
    absent = ["model.layers.1.mlp.experts.5.up_proj.weight", "model.norm.weight"]
    directory = changed(directories["qwen3_moe"], tmp_path, lambda tensors: [tensors.pop(name) for name in absent])
    with pytest.raises(RankError, match=f"CheckpointError: {directory}: .*{', '.join(absent)}"):
        run_ranks(build_engine, 2, under_mbridge(directory, Layout(ranks=2, ep=2)))


@pytest.mark.parametrize(
    ("name", "rows"), [("model.embed_tokens.weight", 101), ("model.layers.3.mlp.experts.7.down_proj.weight", 32), ("model.norm.weight", 32)]
)
def test_a_tensor_of_another_shape_is_refused_with_both(name, rows, directories, tmp_path):
    def double(tensors):
        tensors[name] = torch.cat([tensors[name], tensors[name]])

    directory = changed(directories["qwen3_moe"], tmp_path, double)
    with pytest.raises(RankError, match=rf"CheckpointError: {re.escape(name)} has shape \({2 * rows},.*must have \({rows},"):
        run_ranks(build_engine, 2, under_mbridge(directory, Layout(ranks=2, tp=2, etp=2)))
