"""Published models that no recipe is shipped for: what Megatron builds from their config.json, on meta tensors, has all their numbers."""

import sys
from math import prod
from pathlib import Path

import pytest
import torch
from engine_ranks import run_ranks
from scale_ranks import numbers_to_push
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent / "config"))

from published_families import PUBLISHED

from moerl.config.schema.layout import Layout
from moerl.config.schema.train_config import OptimizerConfig, TrainConfig
from moerl.models.families.family_table import FAMILIES
from moerl.planner.parameter_counts import model_parameters

NUMBERS = {
    "minimax_m2": 228_689_764_864, "qwen3_next": 79_674_391_296, "deepseek_v32": 671_877_944_064, "glm_moe_dsa": 743_911_218_432,
}  # fmt: skip
"""Without multi-token prediction: those of transformers' modules."""
BUILT = [name for name in NUMBERS if not list(FAMILIES[name].broken_rules(PUBLISHED[name]))]
"""Those that the installed version of Megatron has the layers of."""


@pytest.mark.parametrize("name", NUMBERS)
def test_transformers_modules_and_the_planner_have_the_numbers(name):
    hf, fields = PUBLISHED[name], FAMILIES[name].transformer_config(PUBLISHED[name])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf))
    assert sum(prod(tensor.shape) for tensor in model.state_dict().values()) == NUMBERS[name]
    frequency = fields["moe_layer_freq"]
    biases = fields["num_moe_experts"] * (sum(frequency) if isinstance(frequency, list) else hf["num_hidden_layers"])
    assert sum(model_parameters(hf)) == NUMBERS[name] - (biases if fields.get("moe_router_enable_expert_bias") else 0)


@pytest.mark.parametrize("name", BUILT)
def test_megatron_builds_the_numbers(name):
    train = TrainConfig(optimizer=OptimizerConfig(lr=1e-3), layout=Layout())
    assert run_ranks(numbers_to_push, 1, PUBLISHED[name], train) == NUMBERS[name]
