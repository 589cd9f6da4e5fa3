"""Dense folders become mixtures of experts that compute the same; every expert holds the MLP's bytes."""

import json

import kills
import numpy as np
import pytest
import torch
from engine_cases import random_batch
from family_cases import transformers_logits, write_case
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from moerl.__main__ import app
from moerl.convert.conversion import Conversion, conversion_of, convert
from moerl.convert.hf.hf_writing import WriteOptions
from moerl.convert.inspect import verify_digests
from moerl.convert.tensors import writing
from moerl.convert.upcycle import ROUTER_STD, Upcycling
from moerl.models.hf_checkpoint import HFCheckpoint
from moerl.types.errors import ConvertError

BATCH = random_batch(num_sequences=7)
SEQUENCES = [BATCH.token_ids_T[start:end].tolist() for start, end in zip(BATCH.offsets[:-1], BATCH.offsets[1:], strict=True)]
FOUR = Upcycling(num_experts=4, top_k=2, router_seed=0)
CASES = {
    "llama-tied": ("mixtral", "block_sparse_moe", ("w1", "w3", "w2")),
    "llama": ("mixtral", "block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3": ("qwen3_moe", "mlp", ("gate_proj", "up_proj", "down_proj")),
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    root = tmp_path_factory.mktemp("dense")
    directories = {name: write_case(name, root) for name in ("llama-tied", "qwen3")}
    return directories | {"llama": write_case("llama-tied", root / "untied", tie_word_embeddings=False)}


def conversion(source, target, chosen=FOUR, **options):
    options = {"options": WriteOptions(shard_bytes=30_000, workers=1), **options}
    return Conversion(source=source, target=target, to="moe", upcycling=chosen, **options)


def upcycle(source, target, chosen=FOUR, **options):
    return convert(conversion(source, target, chosen, **options), dry_run=False)


def tensors_of(directory):
    with HFCheckpoint(directory) as held:
        return {name: held.read(name) for name in held.names()}


@pytest.mark.parametrize("experts", [4, 8])
@pytest.mark.parametrize("name", CASES)
def test_the_mixture_computes_the_logits_of_the_dense_model(name, experts, dense, tmp_path):
    upcycle(dense[name], tmp_path / "moe", Upcycling(num_experts=experts, top_k=experts // 2 + 1, router_seed=3))
    for found, wanted in zip(transformers_logits(tmp_path / "moe", SEQUENCES), transformers_logits(dense[name], SEQUENCES), strict=True):
        assert wanted.abs().max() > 1
        np.testing.assert_allclose(found, wanted, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_every_expert_holds_the_bytes_of_the_mlp_and_nothing_else_changes(name, dense, tmp_path):
    upcycle(dense[name], tmp_path / "moe")
    model_type, block, projections = CASES[name]
    found, before = tensors_of(tmp_path / "moe"), load_file(dense[name] / "model.safetensors")
    for layer in range(4):
        prefix = f"model.layers.{layer}"
        for kind, projection in zip(("gate", "up", "down"), projections, strict=True):
            wanted = before.pop(f"{prefix}.mlp.{kind}_proj.weight")
            assert all(found.pop(f"{prefix}.{block}.experts.{expert}.{projection}.weight").equal(wanted) for expert in range(4))
        assert found.pop(f"{prefix}.{block}.gate.weight").shape == (4, 32)
    assert found.keys() == before.keys()
    assert all(found[each].equal(tensor) for each, tensor in before.items())
    config = json.loads((tmp_path / "moe" / "config.json").read_text())
    assert config["model_type"] == model_type
    read = AutoConfig.from_pretrained(tmp_path / "moe")
    assert (read.num_experts_per_tok, read.num_local_experts, read.architectures) == (2, 4, config["architectures"])
    verify_digests(tmp_path / "moe")


def routers(directory):
    return {name: tensor for name, tensor in tensors_of(directory).items() if name.endswith(("moe.gate.weight", "mlp.gate.weight"))}


def test_routers_follow_from_the_seed_and_differ_between_layers(dense, tmp_path):
    upcycle(dense["llama"], tmp_path / "one", options=WriteOptions(shard_bytes=10**9))
    upcycle(dense["llama"], tmp_path / "same", options=WriteOptions(shard_bytes=20_000, workers=4))
    upcycle(dense["llama"], tmp_path / "other", Upcycling(num_experts=4, top_k=2, router_seed=1))
    one, same, other = (list(routers(tmp_path / name).values()) for name in ("one", "same", "other"))
    assert all(left.equal(right) for left, right in zip(one, same, strict=True))
    every = one + other
    assert len(every) == 8 and not any(every[i].equal(every[j]) for i in range(8) for j in range(i))
    assert torch.stack(every).std().item() == pytest.approx(ROUTER_STD, rel=0.1)


def test_tokens_spread_over_the_experts(dense, tmp_path):
    upcycle(dense["qwen3"], tmp_path / "moe")
    router = routers(tmp_path / "moe")["model.layers.0.mlp.gate.weight"]
    hidden = torch.nn.functional.rms_norm(torch.randn(1000, 32, generator=torch.Generator().manual_seed(0)), (32,))
    load = torch.bincount((hidden @ router.T).topk(2).indices.flatten(), minlength=4) / 2000
    assert load.min() > 0.1 and load.max() < 0.4


def test_another_dtype_is_cast_on_the_way(dense, tmp_path):
    upcycle(dense["qwen3"], tmp_path / "moe", dtype="bfloat16")
    assert {tensor.dtype for tensor in tensors_of(tmp_path / "moe").values()} == {torch.bfloat16}
    config = json.loads((tmp_path / "moe" / "config.json").read_text())
    assert "bfloat16" in (config.get("dtype"), config.get("torch_dtype"))


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
def test_a_killed_conversion_goes_on_to_the_same_bytes_but_not_with_another_seed(share, dense, tmp_path):
    moments = kills.count_moments(conversion(dense["llama"], tmp_path / "straight"))
    assert not kills.kill_at(int(share * moments), conversion(dense["llama"], tmp_path / "moe"))
    assert not (tmp_path / "moe").exists()
    partial = writing.partial_of(tmp_path / "moe")
    kept = {path.name: path.stat().st_ino for path in partial.glob("*.safetensors")}
    assert bool(kept) == (share > 0.1)
    with pytest.raises(ConvertError, match="was begun with another plan"):
        upcycle(dense["llama"], tmp_path / "moe", Upcycling(num_experts=4, top_k=2, router_seed=1))
    upcycle(dense["llama"], tmp_path / "moe")
    found, wanted = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("moe", "straight"))
    assert found == wanted
    assert all((tmp_path / "moe" / name).stat().st_ino == inode for name, inode in kept.items())


# -- bad input -------------------------------------------------------------------------------------------------


def options(**changes):
    given = dict(files_from=None, shard_gb=1.0, workers=1, to="moe", dtype="keep", scales="float32", nonfinite="warn")
    return given | dict(experts=4, top_k=2, router_seed=None) | changes


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"experts": None, "top_k": None}, {"--experts": "is needed", "--top-k": "is needed"}),
        ({"experts": 1, "top_k": 1}, {"--experts": "at least 2", "--top-k": "at least 2"}),
        ({"top_k": 5, "dtype": "fp8"}, {"--top-k": "at most --experts=4", "--dtype": "must not be fp8"}),
        ({"to": "hf"}, {"--experts": "has no effect", "--top-k": "has no effect"}),
        ({"to": "moerl", "router_seed": 0, "dtype": "int8"}, {"--router-seed": "has no effect", "--dtype": "must be one of"}),
    ],
)
def test_options_that_do_not_fit_are_all_listed(changes, expected, tmp_path):
    with pytest.raises(ConvertError) as caught:
        conversion_of(tmp_path, tmp_path / "out", **options(**changes))
    rules = {each.path: each.rule for each in caught.value.problems}
    assert all(fragment in rules[path] for path, fragment in expected.items())


@pytest.mark.parametrize(
    ("case", "changes", "rules"),
    [
        ("qwen2", {}, ["must have a counterpart with experts"]),
        ("mixtral", {}, ["must have a counterpart with experts"]),
        ("llama-3.1", {}, ["needs rope_type default"]),
        ("llama-tied", {"rope_theta": None, "rms_norm_eps": None}, ["must be written", "must be written"]),
        ("qwen3", {"head_dim": None}, ["must be written"]),
        ("qwen3", {"attention_bias": True, "hidden_act": "gelu"}, ["needs hidden_act='silu'", "needs attention_bias=False"]),
    ],
)
def test_a_model_that_cannot_become_a_mixture_is_refused_with_every_reason(case, changes, rules, tmp_path):
    directory = write_case(case, tmp_path)
    config = json.loads((directory / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    with pytest.raises(ConvertError) as caught:
        upcycle(directory, tmp_path / "moe")
    assert len(caught.value.problems) == len(rules)
    assert all(each.rule.startswith(rule) for each, rule in zip(caught.value.problems, rules, strict=True))
    assert not writing.partial_of(tmp_path / "moe").exists()


def test_tensors_that_are_missing_or_too_many_are_listed_before_anything_is_written(tmp_path):
    directory = write_case("qwen3", tmp_path)
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.2.mlp.extra.weight"] = torch.ones(1)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ConvertError) as caught:
        upcycle(directory, tmp_path / "moe")
    assert [each.rule for each in caught.value.problems] == ["is missing", "is no tensor of this model"]
    assert not writing.partial_of(tmp_path / "moe").exists()


def test_a_dense_model_in_fp8_becomes_a_mixture_in_another_dtype_alone(dense, tmp_path):
    convert(Conversion(source=dense["qwen3"], target=tmp_path / "fp8", dtype="fp8"), dry_run=False)
    with pytest.raises(ConvertError) as caught:
        upcycle(tmp_path / "fp8", tmp_path / "moe")
    assert [(each.rule, each.fix) for each in caught.value.problems] == [
        ("must not be keep with --to moe for a source in FP8", "--dtype bfloat16")
    ]
    assert not writing.partial_of(tmp_path / "moe").exists()
    upcycle(tmp_path / "fp8", tmp_path / "moe", dtype="bfloat16")
    convert(Conversion(source=tmp_path / "fp8", target=tmp_path / "plain", dtype="bfloat16"), dry_run=False)
    upcycle(tmp_path / "plain", tmp_path / "wanted")
    found, wanted = tensors_of(tmp_path / "moe"), tensors_of(tmp_path / "wanted")
    assert found.keys() == wanted.keys() and all(tensor.equal(wanted[name]) for name, tensor in found.items())


def test_the_command_line_upcycles(dense, tmp_path, capsys):
    arguments = [str(dense["qwen3"]), str(tmp_path / "moe"), "--to", "moe", "--experts", "4", "--top-k", "2"]
    app(["convert", *arguments, "--dry-run"], standalone_mode=False)
    assert "would write" in capsys.readouterr().out and not (tmp_path / "moe").exists()
    app(["convert", *arguments], standalone_mode=False)
    assert json.loads((tmp_path / "moe" / "config.json").read_text())["num_experts"] == 4
