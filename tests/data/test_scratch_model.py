"""Scratch checkpoints: complete, seeded, loadable by transformers, and what `moerl check` believes they are."""

import importlib.util
import json
import string
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from typer.testing import CliRunner

from moerl.config.derive.model_shape import read_config, shape_of_config
from moerl.config.derive.scratch_config import CHARACTERS, VOCAB_SIZE, scratch_config
from moerl.config.rules.checkpoint_files import checkpoint_problems
from moerl.config.schema.model_config import ScratchModel
from moerl.scratch_model import write_scratch_model
from moerl.types.errors import CheckpointError

SMALL = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn_size": 16}


def test_every_printable_character_is_one_token_and_comes_back(tokenizer):
    printable = set(string.printable) - set("\t\r\x0b\x0c")
    assert set(CHARACTERS) == printable
    ids = tokenizer.encode(CHARACTERS, add_special_tokens=False)
    assert len(ids) == len(set(ids)) == len(CHARACTERS)
    assert tokenizer.decode(ids) == CHARACTERS
    assert tokenizer.encode(CHARACTERS) == ids


@pytest.mark.parametrize("text", ["a  b   c", " lead and trail ", "\n\n", "it 's , not . ok ?", "<pad", "\\boxed{7}"])
def test_spaces_and_punctuation_survive_the_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_other_characters_become_unknown_one_by_one(tokenizer):
    assert tokenizer.encode("a\u00e9\u65e5b", add_special_tokens=False)[1:3] == [tokenizer.unk_token_id] * 2


def test_special_tokens_are_single_and_distinct(tokenizer):
    ids = tokenizer.convert_tokens_to_ids(["<pad>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>"])
    assert ids == [0, 1, 2, 3, 4]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.decode(tokenizer.encode("1<eos><|im_end|>"), skip_special_tokens=True) == "1"


def test_the_chat_template_marks_turns(tokenizer):
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "2+2="}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3"])
def test_transformers_loads_every_weight_and_ties_the_embeddings(family, tmp_path):
    scratch = ScratchModel(family=family, **SMALL)
    write_scratch_model(scratch, 64, tmp_path / "model", seed=3)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.get_input_embeddings().weight.shape == (VOCAB_SIZE, 32)
    ids = AutoTokenizer.from_pretrained(tmp_path / "model")("7=", return_tensors="pt").input_ids
    assert torch.isfinite(model(ids).logits).all()
    assert GenerationConfig.from_pretrained(tmp_path / "model").eos_token_id == 1


def test_a_deepseek_model_has_layers_of_multi_token_prediction_under_published_names(tmp_path):
    scratch = ScratchModel(family="deepseek_v3", mtp_layers=2, **SMALL)
    write_scratch_model(scratch, 64, tmp_path / "model", seed=3)
    assert json.loads((tmp_path / "model" / "config.json").read_text()) == scratch_config(scratch, 64)
    assert list(checkpoint_problems(tmp_path / "model")) == []
    assert shape_of_config(read_config(tmp_path / "model")).num_mtp_layers == 2
    weights = load_file(tmp_path / "model" / "model.safetensors")
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "mismatched_keys", "error_msgs"))
    for layer in (2, 3):
        own = {name.removeprefix(f"model.layers.{layer}.") for name in weights if name.startswith(f"model.layers.{layer}.")}
        like_layer_1 = {name.removeprefix("model.layers.1.") for name in weights if name.startswith("model.layers.1.")}
        extra = {"enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head", "embed_tokens"}
        assert own == like_layer_1 | {f"{name}.weight" for name in extra}
        assert torch.equal(weights[f"model.layers.{layer}.embed_tokens.weight"], weights["model.embed_tokens.weight"])
        assert weights[f"model.layers.{layer}.eh_proj.weight"].shape == (32, 64)


def test_the_written_model_is_the_one_that_was_checked(checkpoint):
    scratch = ScratchModel(**SMALL)
    assert json.loads((checkpoint / "config.json").read_text()) == scratch_config(scratch, 256)
    assert list(checkpoint_problems(checkpoint)) == []
    shape = shape_of_config(read_config(checkpoint))
    assert shape == shape_of_config(scratch_config(scratch, 256))
    assert (shape.num_experts, shape.expert_ffn_size, shape.max_positions) == (8, 16, 256)


def test_a_checkpoint_saved_again_by_transformers_keeps_its_shape(checkpoint, tmp_path):
    AutoModelForCausalLM.from_pretrained(checkpoint).save_pretrained(tmp_path)
    assert shape_of_config(read_config(tmp_path)) == shape_of_config(read_config(checkpoint))


def test_experts_are_stored_one_by_one_under_published_names(checkpoint):
    names = load_file(checkpoint / "model.safetensors").keys()
    assert {f"model.layers.1.mlp.experts.{i}.{part}_proj.weight" for i in range(8) for part in ("gate", "up", "down")} <= names
    assert "lm_head.weight" not in names


def test_the_seed_decides_the_weights_and_nothing_else_does(tmp_path):
    def weights(name: str, seed: int) -> dict[str, torch.Tensor]:
        write_scratch_model(ScratchModel(**SMALL), 64, tmp_path / name, seed)
        return load_file(tmp_path / name / "model.safetensors")

    first = weights("a", 5)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    again, other = weights("b", 5), weights("c", 6)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_an_existing_directory_is_left_alone(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        write_scratch_model(ScratchModel(**SMALL), 64, tmp_path / "model", 0)
    assert list((tmp_path / "model").iterdir()) == []


def test_a_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(max_context: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("moerl.scratch_model.character_tokenizer", fail)
    with pytest.raises(OSError, match="disk full"):
        write_scratch_model(ScratchModel(**SMALL), 64, tmp_path / "model", 0)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def mini_model() -> typer.Typer:
    """tools/mini_model.py as a command line."""
    file = Path(__file__).parents[2] / "tools" / "mini_model.py"
    spec = importlib.util.spec_from_file_location("mini_model", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    app = typer.Typer()
    app.command()(module.main)
    return app


def test_the_command_line_writes_what_its_settings_say(mini_model, tmp_path):
    directory = tmp_path / "mini"
    result = CliRunner().invoke(mini_model, [str(directory), "family=qwen3", "hidden_size=32", "num_layers=1", "--max-context", "99"])
    assert result.exit_code == 0, result.output
    config = scratch_config(ScratchModel(family="qwen3", hidden_size=32, num_layers=1), 99)
    assert json.loads((directory / "config.json").read_text()) == config


@pytest.mark.parametrize("setting", ["family=gpt", "hidden=3", "num_layers=0", "num_layers"])
def test_the_command_line_refuses_unknown_settings(mini_model, tmp_path, setting):
    result = CliRunner().invoke(mini_model, [str(tmp_path / "mini"), setting])
    assert result.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_writing_it_puts_no_progress_bar_on_the_terminal(tmp_path, capfd):
    write_scratch_model(ScratchModel(num_layers=1, hidden_size=32, num_experts=4), 32, tmp_path / "model", 0)
    assert capfd.readouterr() == ("", "")
