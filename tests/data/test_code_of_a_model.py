"""Code that lies in a model's folder is not run, whatever its files ask for."""

import json
import shutil

import pytest
import torch

from moerl.config.rules.checkpoint_files import checkpoint_problems
from moerl.models.transformers_config import read_transformers_config
from moerl.models.transformers_tokenizer import read_tokenizer
from moerl.rollout.engines.hf.hf_model import load_model
from moerl.types.errors import ConfigError


@pytest.fixture
def folder(checkpoint, tmp_path):
    """A model whose files name classes of a module beside them, which leaves a file when it is imported."""
    copied = tmp_path / "model"
    shutil.copytree(checkpoint, copied)
    (copied / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    _add(copied / "config.json", auto_map={"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"})
    _add(copied / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]})
    return copied


def _add(file, **settings):
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def test_a_model_of_a_known_family_is_computed_by_transformers_own_class(folder, tmp_path):
    """Published checkpoints name their first code for ever, also when transformers has the model."""
    assert type(read_transformers_config(folder)).__module__.startswith("transformers.")
    model = load_model(folder, dtype=torch.float32, load="checkpoint", deterministic=False, max_context=32)
    assert type(model).__module__.startswith("transformers.")
    assert read_tokenizer(folder).eos_token_id is not None
    assert list(checkpoint_problems(folder)) == []
    assert not (tmp_path / "ran").exists()


def test_a_tokenizer_that_is_code_is_refused(folder, tmp_path):
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text("{}")
    _add(folder / "tokenizer_config.json", tokenizer_class="Evil")
    assert [each.rule for each in checkpoint_problems(folder)] == ["must have a tokenizer that is data"]
    with pytest.raises(ConfigError, match="must have a tokenizer that can be read"):
        read_tokenizer(folder)
    assert not (tmp_path / "ran").exists()


def test_a_config_json_that_transformers_does_not_take_is_not_blamed_on_the_tokenizer(folder):
    _add(folder / "config.json", rms_norm_eps="1e-6")
    with pytest.raises(ConfigError, match=r"(?s)must have a config.json that transformers takes.*rms_norm_eps.*got str"):
        read_tokenizer(folder)
