"""Megatron-Bridge as the oracle of the native bridge: both load the same parameters and export the same tensors."""

import dataclasses

import pytest
from bridge_jobs import build_engine, differences
from engine_cases import settings
from engine_ranks import RankError, run_ranks
from family_cases import CASES, write_case
from safetensors.torch import load_file, save_file

from moerl.config.rules.model_rules import missing
from moerl.config.schema.layout import Layout
from moerl.models.bridge_packages import BRIDGES

PACKAGE = BRIDGES["megatron_bridge"]

pytestmark = pytest.mark.skipif(missing(PACKAGE) is not None, reason=f"{missing(PACKAGE)} ({PACKAGE.install})")

NAMES = tuple(name for name, config in CASES.items() if config["model_type"] in PACKAGE.families)
SPARSE = tuple(name for name in NAMES if any("expert" in key for key in CASES[name]))
LAYOUTS = {
    "one": (Layout(), NAMES),
    "tp2-etp1": (Layout(ranks=2, tp=2), NAMES),
    "tp2-pp2": (Layout(ranks=4, tp=2, pp=2, etp=2), NAMES),
    "tp2-etp1-ep2-pp2": (Layout(ranks=4, tp=2, pp=2, ep=2), SPARSE),
    "tp2-pp2-ep2-etp2": (Layout(ranks=8, tp=2, pp=2, ep=2, etp=2), SPARSE),
    "pp2-vpp2": (Layout(ranks=2, pp=2, vpp=2), NAMES),
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("megatron_bridge")
    return {name: write_case(name, root) for name in NAMES}


QUICK = ("tp2-etp1-ep2-pp2", "pp2-vpp2")


@pytest.mark.parametrize("layout", [pytest.param(name, marks=() if name in QUICK else pytest.mark.matrix) for name in LAYOUTS])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.matrix)])
def test_both_bridges_load_and_export_the_same(layout, dtype, directories):
    sizes, names = LAYOUTS[layout]
    chosen = [settings(directories[name], sizes, dtype=dtype) for name in names]
    found = run_ranks(differences, sizes.ranks, chosen, "megatron_bridge")
    assert dict(zip(names, found, strict=True)) == {name: [] for name in names}


def test_every_family_that_is_allowed_is_compared():
    assert {CASES[name]["model_type"] for name in NAMES} == set(PACKAGE.families)


def test_the_patch_of_scattering_is_needed(directories):
    chosen = [settings(directories["qwen3"], Layout(ranks=2, tp=2))]
    [found] = run_ranks(differences, 2, chosen, "megatron_bridge", without=["megatron_bridge_scatter"])
    assert "rank 0: loaded decoder.layers.0.mlp.linear_fc2.weight" in found


def test_every_absent_tensor_is_named(directories, tmp_path):
    absent = ["model.layers.1.mlp.experts.5.up_proj.weight", "model.norm.weight"]
    tensors = load_file(directories["qwen3_moe"] / "model.safetensors")
    (tmp_path / "config.json").write_bytes((directories["qwen3_moe"] / "config.json").read_bytes())
    kept = {name: tensor for name, tensor in tensors.items() if name not in absent}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    chosen = settings(tmp_path, Layout(ranks=2, ep=2))
    chosen = dataclasses.replace(chosen, train=dataclasses.replace(chosen.train, bridge="megatron_bridge"))
    with pytest.raises(RankError, match=f"CheckpointError: {tmp_path}: .*{', '.join(absent)}"):
        run_ranks(build_engine, 2, chosen)
