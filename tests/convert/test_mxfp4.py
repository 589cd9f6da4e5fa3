"""Published gpt-oss checkpoints, whose experts are MXFP4, become plain ones: the numbers of transformers, and a model that loads."""

import json

import pytest
import torch
from family_cases import write_case
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from moerl.convert.conversion import Conversion, convert
from moerl.convert.hf.mxfp4 import unpacked
from moerl.types.errors import ConvertError

STACKS = [f"model.layers.{layer}.mlp.experts.{name}" for layer in range(4) for name in ("gate_up_proj", "down_proj")]


@pytest.fixture
def packed(tmp_path):
    """The folder of a tiny gpt-oss with random MXFP4 experts."""
    directory, generator = write_case("gpt_oss", tmp_path, intermediate_size=32), torch.Generator().manual_seed(0)
    tensors = load_file(directory / "model.safetensors")
    for name in STACKS:
        experts, rows, columns = tensors.pop(name).shape
        shape = (experts, columns, rows // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(118, 128, shape, dtype=torch.uint8, generator=generator)
    save_file({name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}, _weights(directory))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    return directory


def _weights(directory):
    return directory / "model.safetensors"


def change(directory, **tensors):
    """None: without that tensor."""
    held = load_file(_weights(directory)) | {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({name: tensor for name, tensor in held.items() if tensor is not None}, _weights(directory))


def test_experts_are_those_that_transformers_unpacks(packed, tmp_path):
    before = load_file(_weights(packed))
    convert(Conversion(source=packed, target=tmp_path / "plain", dtype="bfloat16"), dry_run=False)
    after = load_file(_weights(tmp_path / "plain"))
    assert after.keys() == {name.removesuffix("_blocks") for name in before if not name.endswith("_scales")}
    for name in STACKS:
        assert after[name].equal(convert_moe_packed_tensors(before[f"{name}_blocks"], before[f"{name}_scales"])), name
    assert after["lm_head.weight"].equal(before["lm_head.weight"])


def test_the_plain_folder_is_a_checkpoint_that_becomes_one_of_a_run(packed, tmp_path):
    convert(Conversion(source=packed, target=tmp_path / "plain", dtype="bfloat16"), dry_run=False)
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    convert(Conversion(source=tmp_path / "plain", target=tmp_path / "run", to="moerl", dtype="bfloat16"), dry_run=False)


def test_every_value_and_the_ends_of_the_exponents():
    blocks = torch.arange(16, dtype=torch.uint8).repeat(3, 1) * 17  # both halves of a byte alike: 0, 0, 0.5, 0.5, 1, ...
    positive = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    once = torch.cat([positive, -positive]).repeat_interleave(2)
    found = unpacked(blocks, torch.tensor([127, 128, 0], dtype=torch.uint8))
    assert found.equal(torch.cat([once, 2 * once, once * 2.0**-127]))


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        (f"{STACKS[0]}_scales", None, "there is none"),
        (f"{STACKS[1]}_blocks", None, "has no values"),
        (f"{STACKS[2]}_scales", torch.zeros(8, 3, 1, dtype=torch.uint8), "needs model.layers.1.mlp.experts.gate_up_proj_scales"),
        (f"{STACKS[3]}_blocks", torch.zeros(8, 32, 8, dtype=torch.uint8), "must be uint8 of shape (experts, out, blocks, 16)"),
    ],
)
def test_values_and_exponents_that_do_not_fit_are_named(name, tensor, said, packed, tmp_path):
    change(packed, **{name.replace(".", "__"): tensor})
    with pytest.raises(ConvertError) as caught:
        convert(Conversion(source=packed, target=tmp_path / "plain", dtype="bfloat16"), dry_run=False)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("options", "fix"), [({"dtype": "fp8"}, "--dtype bfloat16"), ({"to": "moerl", "dtype": "bfloat16"}, "then that folder")]
)
def test_what_mxfp4_cannot_become_at_once_is_refused_with_the_way_there(options, fix, packed, tmp_path):
    with pytest.raises(ConvertError, match=fix):
        convert(Conversion(source=packed, target=tmp_path / "out", **options), dry_run=False)


def test_fp8_of_plain_stacks_says_that_experts_stay_as_they_are(tmp_path):
    """transformers would replace them by experts in FP8, which have no biases."""
    convert(Conversion(source=write_case("gpt_oss", tmp_path), target=tmp_path / "fp8", dtype="fp8"), dry_run=False)
    kept = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert "model.layers.0.mlp.experts" in kept and "lm_head" in kept
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "fp8"))
    replaced = replace_with_fp8_linear(model, kept, FineGrainedFP8Config(modules_to_not_convert=kept)).model.layers[0]
    assert type(replaced.mlp.experts).__name__ == "GptOssExperts"
    assert type(replaced.self_attn.q_proj).__name__ == "FP8Linear"
