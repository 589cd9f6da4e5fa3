"""A config.json of model_type deepseek_v3 that Megatron would compute otherwise is refused with the reason."""

import json

import pytest

from moerl.config.rules.checkpoint_files import checkpoint_problems
from moerl.models.families.deepseek_v3 import DEEPSEEK_V3
from moerl.models.families.parts.rope import rope_parameters
from moerl.types.errors import CheckpointError

PUBLISHED = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 1,
    "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02,
    "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4,
    "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
"""As published with DeepSeek-V3, without quantization_config: its weights converted to bfloat16."""


def test_the_published_model_breaks_no_rule_and_is_described_in_megatrons_words():
    assert list(DEEPSEEK_V3.broken_rules(PUBLISHED)) == []
    described = DEEPSEEK_V3.transformer_config(PUBLISHED)
    expected = {
        "moe_layer_freq": [0] * 3 + [1] * 58,
        "moe_shared_expert_intermediate_size": 2048,
        "moe_router_num_groups": 8,
        "moe_router_group_topk": 4,
        "moe_router_bias_update_rate": 0.0,
        "rope_type": "yarn",
        "rotary_scaling_factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    }
    assert {name: described[name] for name in expected} == expected


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 5.0, "rope_scaling": {"type": "yarn", "factor": 2}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5.0, "factor": 2}},
    ],
)
def test_rope_is_read_in_the_published_and_in_transformers_new_form(config):
    read = rope_parameters(config)
    assert (read["rope_type"], read["rope_theta"], read["factor"]) == ("yarn", 5.0, 2)


def test_without_scaling_rope_is_the_plain_one():
    assert rope_parameters({"rope_theta": 5.0, "rope_scaling": None}) == {"rope_theta": 5.0, "rope_type": "default"}


BROKEN = {
    "rms_norm_eps": (1e-5, "compressed queries"),
    "norm_topk_prob": (False, "normalises"),
    "attention_bias": (True, "no biases"),
    "rope_interleave": (False, "neighbouring channels"),
    "tie_word_embeddings": (True, "cannot save"),
    "hidden_act": ("gelu", "SiLU"),
    "scoring_func": ("softmax", "sigmoids"),
    "topk_method": ("greedy", "correction bias"),
    "moe_layer_freq": (2, "from first_k_dense_replace on"),
    "num_experts_per_tok": (4, "its 2 best experts"),
    "n_group": (7, "divide n_routed_experts"),
    "first_k_dense_replace": (61, "must have experts"),
    "num_key_value_heads": (8, "of its own"),
    "head_dim": (128, "not rotary"),
    "quantization_config": ({"quant_method": "fp8"}, "the unquantized checkpoint"),
    "rope_scaling": ({"type": "linear", "factor": 2}, "has these two"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_model_megatron_would_compute_otherwise_is_refused_with_the_reason(name, tmp_path):
    value, said = BROKEN[name]
    config = PUBLISHED | {name: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    problems = [problem for problem in checkpoint_problems(tmp_path) if problem.path == "model.path" and said in str(problem)]
    assert len(problems) == 1
    assert name.removesuffix("_config") in problems[0].rule
    with pytest.raises(CheckpointError, match=name.removesuffix("_config")):
        DEEPSEEK_V3.checked_config(config)


@pytest.mark.parametrize("more", [{}, {"scale_fmt": "ue8m0"}, {"modules_to_not_convert": ["lm_head"]}, {"fmt": "float8_e4m3fn"}])
def test_weights_in_blocks_of_fp8_are_read_as_published(more):
    """MiniMax-M2 names the format as PyTorch does."""
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    assert list(DEEPSEEK_V3.broken_rules(PUBLISHED | {"quantization_config": quantization | more})) == []
    for other in ({"weight_block_size": [64, 128]}, {"fmt": "e5m2"}, {"weight_block_size": None}):
        (broken,) = DEEPSEEK_V3.broken_rules(PUBLISHED | {"quantization_config": quantization | other})
        assert "quantization_config" in broken.rule


@pytest.mark.parametrize("changes", [{"attention_factor": 1.1}, {"truncate": False}, {"mscale": None}])
def test_a_yarn_that_megatron_does_not_have_is_refused(changes):
    config = PUBLISHED | {"rope_scaling": PUBLISHED["rope_scaling"] | changes}
    assert [rule for rule, _, _ in DEEPSEEK_V3.broken_rules(config)] != []


def test_without_a_group_limit_the_number_of_experts_per_group_is_free():
    config = PUBLISHED | {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 6}
    assert list(DEEPSEEK_V3.broken_rules(config)) == []
    assert DEEPSEEK_V3.transformer_config(config)["moe_router_num_groups"] is None
