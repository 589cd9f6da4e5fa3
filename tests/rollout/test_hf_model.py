"""Loading a model for the hf engine, and its parameters under checkpoint names."""

import json
from pathlib import Path

import pytest
import torch

from moerl.rollout.engines.hf.hf_model import checkpoint_specs, checkpoint_views, load_model
from moerl.types.errors import EngineError
from moerl.weights.plan.spec_tensors import spec_of


def load(directory: Path, **changes):
    options = dict(dtype=torch.float32, load="dummy", deterministic=False, max_context=256)
    return load_model(directory, **{**options, **changes})


@pytest.mark.parametrize("name", ["moe", "dense", "latent"])
def test_the_expected_tensors_are_those_of_the_checkpoint_file(checkpoints, name):
    checkpoint = checkpoints[name]
    specs = {key: spec_of(key, tensor) for key, tensor in checkpoint.tensors.items()}
    assert checkpoint_specs(checkpoint.directory, torch.float32) == specs
    assert "lm_head.weight" in specs or name == "dense"  # tied


@pytest.mark.parametrize("name", ["moe", "dense", "latent"])
def test_copying_into_the_views_gives_the_checkpoints_model(checkpoints, name):
    checkpoint = checkpoints[name]
    dummy, loaded = load(checkpoint.directory), load(checkpoint.directory, load="checkpoint")
    for key, view in checkpoint_views(dummy).items():
        view.copy_(checkpoint.tensors[key])
    for (key, ours), (_, theirs) in zip(dummy.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert torch.equal(ours, theirs), key


def test_the_bias_of_a_router_is_float32_in_every_server(checkpoints):
    directory = checkpoints["latent"].directory
    in_float32 = {name for name, spec in checkpoint_specs(directory, torch.bfloat16).items() if spec.dtype == "float32"}
    assert in_float32 == {"model.layers.1.mlp.gate.e_score_correction_bias"}
    for source in ("dummy", "checkpoint"):
        views = checkpoint_views(load(directory, dtype=torch.bfloat16, load=source))
        assert {name for name, view in views.items() if view.dtype == torch.float32} == in_float32


def test_specs_have_the_dtype_the_server_runs_in(checkpoints):
    assert {spec.dtype for spec in checkpoint_specs(checkpoints["moe"].directory, torch.bfloat16).values()} == {"bfloat16"}


@pytest.mark.parametrize("name", ["moe", "dense", "latent"])
def test_a_context_longer_than_the_model_knows_is_refused(checkpoints, name):
    with pytest.raises(EngineError, match=r"model.max_context = 641: must be at most 640.*Lower model.max_context"):
        load(checkpoints[name].directory, max_context=641)


def test_a_sliding_window_is_refused(checkpoints, tmp_path):
    config = json.loads((checkpoints["dense"].directory / "config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    config.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match="sliding_window = 8 of .*: must be off"):
        load(tmp_path)
