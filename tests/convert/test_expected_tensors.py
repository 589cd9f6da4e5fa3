"""What the converter expects of a config.json is what models have: transformers' tiny ones, the published ones. See also test_families."""

import json
import sys
from pathlib import Path

import pytest
from family_cases import CASES, write_case

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))

from published_tensors import PUBLISHED_COUNTS, published_tensors

from moerl.config.derive.model_configs import published_config
from moerl.convert.hf.hf_source import HFSource
from moerl.convert.hf.joined_stacks import in_parts
from moerl.convert.sharded.expected_tensors import expected_tensors
from moerl.convert.sharded.parameters import num_experts
from moerl.models.families.family_table import FAMILIES

VARIANTS = [
    *((name, {}) for name in CASES),
    ("deepseek_v3", {"q_lora_rank": None}),
    ("deepseek_v3", {"n_shared_experts": 2, "first_k_dense_replace": 3}),
    ("glm4_moe", {"attention_bias": False}),
    ("qwen2_moe", {"qkv_bias": False}),
    ("qwen3_moe", {"tie_word_embeddings": True}),
    ("mixtral", {"num_key_value_heads": 1}),
]


@pytest.mark.parametrize(("name", "changes"), VARIANTS)
def test_a_family_is_expected_to_have_what_it_has(name, changes, tmp_path):
    directory = write_case(name, tmp_path, **changes)
    config = json.loads((directory / "config.json").read_text())
    family = FAMILIES[config["model_type"]]
    expected = expected_tensors(family, config)
    found = {name: held.shape for name, held in in_parts(HFSource.open(directory), family, num_experts(family, config)).tensors.items()}
    assert {**expected.shapes, **expected.copies} == found
    assert not expected.shapes.keys() & expected.copies.keys()


@pytest.mark.parametrize("name", PUBLISHED_COUNTS)
def test_the_largest_models_are_expected_to_have_what_is_published(name):
    config = published_config(name)
    expected = expected_tensors(FAMILIES[config["model_type"]], config)
    assert {**expected.shapes, **expected.copies} == published_tensors(config)
