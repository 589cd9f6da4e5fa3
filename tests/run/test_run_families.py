"""Whole runs from a checkpoint of every kind of family: the hf engine samples with what Megatron trains."""

import json
import math
import sys
from pathlib import Path

import pytest
from whole_runs import DIGIT, SYNC, rows

sys.path.insert(0, str(Path(__file__).parent.parent / "train"))

from family_cases import BUILT, write_case

from moerl import run
from moerl.check import load_checked
from moerl.config.derive.scratch_config import TOKEN_IDS, VOCAB_SIZE
from moerl.scratch_model import character_tokenizer

pytestmark = [pytest.mark.matrix, pytest.mark.usefixtures("shared_ray")]  # twenty seconds each

DENSE = ("train.layout.ep=1",)
CASES = {
    "qwen2-tied": DENSE,
    "llama-3.1": DENSE,
    "qwen2_moe": (),
    "mixtral": ("train.router_replay=rollout",),
    "kimi_k2": (),
    "glm4_moe": ("train.mtp_loss=0.1",),
    "gpt_oss": ("train.router_replay=rollout",),
    "minimax_m2": ("train.router_replay=rollout",),
    "deepseek_v32": ("train.router_replay=rollout", "train.mtp_loss=0.1"),
    "glm_moe_dsa": (),
    "qwen3_next": ("train.layout.tp=1", "train.router_replay=rollout"),
}


@pytest.mark.parametrize("name", [name for name in CASES if name in BUILT])
def test_a_checkpoint_of_a_family_trains_and_is_served(name, tmp_path):
    directory = write_case(name, tmp_path, vocab_size=VOCAB_SIZE, max_position_embeddings=64)
    character_tokenizer(64).save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": TOKEN_IDS["<eos>"]}))
    model = (f"model.path={directory}", "model.scratch=null", "model.max_context=64", "train.layout.tp=2", *CASES[name])
    sizes = ("num_steps=2", "groups_per_step=4", "group_size=4", "save_every=0", "rollout.max_running=16", DIGIT)
    run.train(load_checked([f"recipe={SYNC}", f"output_dir={tmp_path / 'out'}", *model, *sizes]))
    found = rows(tmp_path / "out", SYNC)
    assert [row["step"] for row in found] == [1, 2]
    assert all(row["train/kl_old"] == 0.0 and row["mismatch/mean"] < 2e-6 for row in found)
    assert all(math.isfinite(row["train/loss"]) and row["train/grad_norm"] > 0 for row in found)
