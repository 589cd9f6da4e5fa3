"""A run that begins with a converted checkpoint is the run that loads the Hugging Face folder itself."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from whole_runs import DIGIT, SYNC, rows

sys.path.insert(0, str(Path(__file__).parent.parent / "train"))

from family_cases import write_case

from moerl import run
from moerl.check import load_checked
from moerl.config.derive.scratch_config import TOKEN_IDS, VOCAB_SIZE
from moerl.convert.conversion import Conversion, convert
from moerl.convert.upcycle import Upcycling
from moerl.scratch_model import character_tokenizer
from moerl.types.errors import ConfigError

pytestmark = pytest.mark.usefixtures("shared_ray")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """Of a dense model, with a tokenizer."""
    root = tmp_path_factory.mktemp("models")
    dense = write_case("qwen3", root, vocab_size=VOCAB_SIZE, max_position_embeddings=64)
    character_tokenizer(64).save_pretrained(dense)
    (dense / "generation_config.json").write_text(json.dumps({"eos_token_id": TOKEN_IDS["<eos>"]}))
    convert(
        Conversion(source=dense, target=root / "mixture", to="moe", upcycling=Upcycling(num_experts=4, top_k=2, router_seed=0)),
        dry_run=False,
    )
    return root / "mixture"


def overrides(output_dir, model):
    chosen = (f"output_dir={output_dir}", f"model.path={model}", "model.scratch=null", "model.max_context=64", DIGIT)
    sizes = ("num_steps=2", "groups_per_step=4", "group_size=4", "save_every=0", "rollout.max_running=16")
    return [f"recipe={SYNC}", *chosen, *sizes]


@pytest.mark.matrix
def test_a_run_begins_with_the_weights_of_a_converted_checkpoint(mixture, tmp_path):
    run.train(load_checked(overrides(tmp_path / "direct", mixture)))
    # The same architecture with other weights, which must not be what the run begins with.
    other = shutil.copytree(mixture, tmp_path / "other")
    scaled = {name: tensor * 0.5 for name, tensor in load_file(other / "model.safetensors").items()}
    save_file(scaled, other / "model.safetensors", metadata={"format": "pt"})
    target = tmp_path / "converted" / SYNC / "checkpoints" / "step-000000"
    convert(Conversion(source=mixture, target=target, to="moerl", dtype="float32"), dry_run=False)
    run.train(load_checked(overrides(tmp_path / "converted", other)))
    direct, converted = rows(tmp_path / "direct"), rows(tmp_path / "converted")
    assert [row["step"] for row in direct] == [1, 2] and direct[0]["train/grad_norm"] > 0
    assert converted == direct


def test_a_converted_checkpoint_of_another_model_is_refused_before_anything_starts(mixture, tmp_path):
    deeper = write_case("qwen3_moe", tmp_path, vocab_size=VOCAB_SIZE, max_position_embeddings=64)
    target = tmp_path / SYNC / "checkpoints" / "step-000000"
    convert(Conversion(source=deeper, target=target, to="moerl", dtype="float32"), dry_run=False)
    with pytest.raises(ConfigError, match="num_experts"):
        load_checked(overrides(tmp_path, mixture))
