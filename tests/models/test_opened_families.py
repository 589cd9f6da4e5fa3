"""Families that the native table lacks, opened by Megatron-Bridge: what is proven of them, what is refused, and a run."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from bridge_jobs import differences
from engine_cases import random_batch, settings
from engine_ranks import run_ranks
from family_cases import transformers_logits
from family_jobs import prove
from opened_cases import OPENED, write_opened

from moerl import run
from moerl.check import load_checked
from moerl.config.derive.scratch_config import TOKEN_IDS, VOCAB_SIZE
from moerl.config.rules.model_rules import missing
from moerl.config.schema.layout import Layout
from moerl.models.bridge_packages import BRIDGES
from moerl.models.find_family import find_family, has_family
from moerl.models.opened_families import opened
from moerl.planner.parameter_counts import model_parameters
from moerl.rollout.engines.hf.hf_model import checkpoint_specs
from moerl.scratch_model import character_tokenizer
from moerl.types.errors import CheckpointError, ConfigError

PACKAGE = BRIDGES["megatron_bridge"]

pytestmark = pytest.mark.skipif(missing(PACKAGE) is not None, reason=f"{missing(PACKAGE)} ({PACKAGE.install})")

ATOL = 2e-5
LAYOUTS = {
    "one": (Layout(), tuple(OPENED)),
    "tp2-pp2": (Layout(ranks=4, tp=2, pp=2, etp=2), tuple(OPENED)),
    "tp2-etp1-ep2-pp2": (Layout(ranks=4, tp=2, pp=2, ep=2), ("olmoe", "deepseek_v2")),
}
BATCH = random_batch(num_sequences=5, vocab_size=VOCAB_SIZE)
CASES = [pytest.param(name, marks=() if name == "tp2-etp1-ep2-pp2" else pytest.mark.matrix(name)) for name in LAYOUTS]
BRIDGED_CASES = [pytest.param(name, marks=() if name == "one" else pytest.mark.matrix(name)) for name in LAYOUTS]
SEQUENCES = [BATCH.token_ids_T[start:end].tolist() for start, end in zip(BATCH.offsets, BATCH.offsets[1:], strict=False)]


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def directories(own_cache, tmp_path_factory):
    root = tmp_path_factory.mktemp("opened")
    found = {name: write_opened(name, root) for name in OPENED}
    assert all(has_family(OPENED[name]) for name in OPENED), [opened(config).refusal for config in OPENED.values()]
    return found


def test_a_proof_is_kept_in_a_file_for_the_next_process(directories, monkeypatch):
    from moerl.models import opened_families

    monkeypatch.setattr(opened_families, "_known", {})
    monkeypatch.setattr(opened_families, "_PROVER", "no.such.module")
    assert all(0 <= opened(config).distance < ATOL for config in OPENED.values())


@pytest.mark.parametrize("layout", BRIDGED_CASES)
def test_a_family_s_rules_carry_the_weights_as_megatron_bridge_does(layout, directories):
    sizes, names = LAYOUTS[layout]
    found = run_ranks(differences, sizes.ranks, [settings(directories[name], sizes) for name in names], "megatron_bridge")
    assert dict(zip(names, found, strict=True)) == {name: [] for name in names}


@pytest.mark.parametrize("layout", CASES)
def test_logits_are_those_of_transformers_and_every_bit_of_the_checkpoint_comes_back(layout, directories):
    sizes, names = LAYOUTS[layout]
    proofs = run_ranks(prove, sizes.ranks, [settings(directories[name], sizes) for name in names], BATCH)
    for name, proof in zip(names, proofs, strict=True):
        for found, expected in zip(proof.packed, transformers_logits(directories[name], SEQUENCES), strict=True):
            np.testing.assert_allclose(found, expected.numpy(), atol=ATOL, rtol=0)
        assert (proof.wrong_names, proof.wrong_pieces) == ([], [])


@pytest.mark.parametrize("name", OPENED)
def test_the_planner_counts_the_parameters_that_transformers_has(name, directories):
    specs = checkpoint_specs(directories[name], torch.float32)
    assert sum(model_parameters(OPENED[name])) == sum(math.prod(spec.shape) for spec in specs.values())


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        pytest.param("mistral", {"sliding_window": 4096}, "sliding_window=null", marks=pytest.mark.matrix),
        ("mistral", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "differ from transformers' by up to"),
        pytest.param(
            "mistral",
            {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 4096},
            "another one in longer sequences",
            marks=pytest.mark.matrix,
        ),
        ("olmoe", {"norm_topk_prob": True}, "differ from transformers' by up to"),
        pytest.param("olmoe", {"clip_qkv": 12.0}, "clips queries", marks=pytest.mark.matrix),
        pytest.param(
            "deepseek_v2",
            {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4},
            "differ from",
            marks=pytest.mark.matrix,
        ),
        pytest.param("deepseek_v2", {"num_nextn_predict_layers": 1}, "multi-token prediction", marks=pytest.mark.matrix),
    ],
)
def test_what_megatron_bridge_would_leave_out_of_a_config_json_is_refused(name, change, named):
    config = OPENED[name] | change
    assert not has_family(config)
    with pytest.raises(CheckpointError, match=named):
        find_family(config)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["gemma", "gemma2", "nemotron"])
def test_architectures_that_moerl_does_not_build_are_refused_by_what_is_missing(name):
    names = {"gemma": "GemmaForCausalLM", "gemma2": "Gemma2ForCausalLM", "nemotron": "NemotronForCausalLM"}
    config = {**OPENED["mistral"], "model_type": name, "architectures": [names[name]]}
    assert "layernorm_zero_centered_gamma=True, " in opened(config).refusal + ", "


def _ready(name, tmp_path, **changes):
    directory = write_opened(name, tmp_path, **changes)
    character_tokenizer(64).save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": TOKEN_IDS["<eos>"]}))
    digit = 'reward.terms.repeat={kind: format, pattern: ".*[0-9].*"}'  # met about every other time: every step has a gradient
    sizes = ("num_steps=2", "groups_per_step=4", "group_size=4", "save_every=0", "rollout.max_running=16", digit)
    model = (f"model.path={directory}", "model.scratch=null", "model.max_context=64", f"output_dir={tmp_path / 'out'}")
    return ["recipe=grpo-tiny-moe-1n2g-sync", *model, *sizes]


def test_another_carrier_of_weights_is_refused_with_the_one_to_take(directories, tmp_path):
    with pytest.raises(ConfigError, match="must be megatron_bridge for this model"):
        load_checked(_ready("mistral", tmp_path))


# -- runs --------------------------------------------------------------------------------------------------------

DENSE = ("mistral",)


def _rows_of_a_run(name, tmp_path, *overrides, **changes):
    layout = ("train.layout.ep=1",) if name in DENSE else ()
    run.train(load_checked([*_ready(name, tmp_path, **changes), "train.bridge=megatron_bridge", *layout, *overrides]))
    (file,) = (tmp_path / "out").rglob("metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    return rows


@pytest.mark.parametrize("name", ["olmoe", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("mistral", "deepseek_v2"))])
def test_a_run_of_an_opened_family_samples_with_what_it_trains(name, directories, tmp_path):
    replay = () if name in DENSE else ("train.router_replay=rollout",)
    rows = _rows_of_a_run(name, tmp_path, *replay)
    assert all(row["train/kl_old"] == 0.0 and row["mismatch/mean"] < 2e-6 and row["train/grad_norm"] > 0 for row in rows)


ENVIRONMENTS = Path(__file__).parents[2]
SERVED = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
"""Sizes for which vLLM has CPU kernels."""
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_intermediate_size": 64}


@pytest.mark.matrix
@pytest.mark.parametrize("name", OPENED)
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_run_of_an_opened_family_is_served_by_an_engine(engine, name, directories, tmp_path):
    if not (ENVIRONMENTS / f".venv-{engine}").is_dir():
        pytest.skip(f"no environment for {engine} (make engines)")
    changes = SERVED | {"num_key_value_heads": 2 if name != "mistral" else 1} | (LATENT if name == "deepseek_v2" else {})
    changes |= {"head_dim": 32} if name == "mistral" else {}
    python = tmp_path / "python"  # what lies on PYTHONPATH for the ranks is not the engine's
    python.write_text(f'#!/bin/sh\nexec env -u PYTHONPATH {ENVIRONMENTS}/.venv-{engine}/bin/python "$@"\n')
    python.chmod(0o755)
    options = (f"rollout.engine={engine}", "rollout.prefill_chunk=128", "deterministic=false", f"rollout.python={python}")
    rows = _rows_of_a_run(name, tmp_path, *options, **changes)
    assert all(row["mismatch/mean"] < 5e-6 and row["train/grad_norm"] > 0 for row in rows)  # of wide matrices: DeepSeek-V2's 2e-6
