"""What a config.json says that Megatron would compute otherwise is refused with the reason; so are architectures without a family."""

import json

import pytest
from published_families import GPT_OSS_ROPE, LLAMA3, PUBLISHED
from transformers import AutoConfig

from moerl.config.derive.model_shape import shape_of_config
from moerl.config.load import load
from moerl.config.rules.checkpoint_files import checkpoint_problems
from moerl.config.rules.fp8_rules import linear_sizes
from moerl.models.families.family_table import FAMILIES
from moerl.models.families.parts import family_checks
from moerl.models.families.parts.rope import rope_parameters
from moerl.models.find_family import NOT_EXPRESSED, find_family
from moerl.types.errors import CheckpointError, ConfigError, Problem
from moerl.types.routes import RouteShape

BROKEN = [
    ("qwen2", "use_sliding_window", True, "window_attn_skip_freq"),
    ("qwen2", "rope_scaling", {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, "max_position_embeddings=32768"),
    ("qwen2", "hidden_act", "gelu", "gated with SiLU"),
    ("llama", "attention_bias", True, "output projection"),
    ("llama", "mlp_bias", True, "all its projections or in none"),
    ("llama", "rope_scaling", LLAMA3 | {"high_freq_factor": 8.0}, "takes no other"),
    ("llama", "rope_scaling", {"rope_type": "dynamic", "factor": 2.0}, "no other"),
    ("llama", "partial_rotary_factor", 0.5, "turns all channels"),
    ("kimi_k2", "partial_rotary_factor", 0.5, "turns all channels"),
    ("gpt_oss", "rope_scaling", GPT_OSS_ROPE | {"partial_rotary_factor": 0.5}, "turns all channels"),
    ("mixtral", "sliding_window", 4096, "sees every position"),
    ("llama", "sliding_window", 4096, "sees every position"),
    ("glm4_moe", "sliding_window", 4096, "sees every position"),
    ("kimi_k2", "sliding_window", 4096, "sees every position"),
    ("mixtral", "router_jitter_noise", 0.1, "from pass to pass"),
    ("mixtral", "quantization_config", {"quant_method": "awq"}, "the unquantized checkpoint"),
    ("mixtral", "num_experts_per_tok", 1, "at least 2"),
    ("gpt_oss", "num_experts_per_tok", 1, "at least 2"),
    ("mixtral", "num_experts_per_tok", 9, "at most num_local_experts=8"),
    ("glm4_moe", "n_shared_experts", 0, "from 1 to"),
    ("kimi_k2", "topk_group", 2, "2 best experts"),
    ("kimi_k2", "rms_norm_eps", 1e-5, "compressed queries"),
    ("gpt_oss", "quantization_config", {"quant_method": "mxfp4"}, "moerl convert SRC DST --dtype bfloat16"),
    ("gpt_oss", "sliding_window", None, "have windows"),
    ("gpt_oss", "layer_types", ["chunked_attention"] * 24, "for each of its 24 layers"),
    ("gpt_oss", "attention_bias", False, "to none"),
    ("gpt_oss", "swiglu_alpha", 1.0, "quick_gelu"),
    ("gpt_oss", "rope_scaling", GPT_OSS_ROPE | {"mscale": 1.0}, "must not have mscale"),
    ("gpt_oss", "rope_scaling", {"type": "linear", "factor": 4.0}, "needs rope_type yarn"),
    ("gpt_oss", "head_dim", None, "a number of its own"),
    ("qwen3_next", "head_dim", None, "a number of its own"),
    ("minimax_m2", "head_dim", None, "a number of its own"),
    ("minimax_m2", "qk_norm_type", "per_head", "of single heads they are another model"),
    ("minimax_m2", "attn_type_list", [1, 0] * 31, "linear attention"),
    ("minimax_m2", "shared_intermediate_size", 512, "no shared experts"),
    ("minimax_m2", "num_experts_per_tok", 1, "does not normalise"),
    ("minimax_m2", "quantization_config", {"quant_method": "fp8"}, "the unquantized checkpoint"),
    ("qwen3_next", "attention_bias", True, "or to none"),
    ("qwen3_next", "mlp_only_layers", [0], "experts in every layer"),
    ("qwen3_next", "num_experts_per_tok", 1, "at least 2"),
    ("qwen3_next", "linear_num_key_heads", 0, "from 1 to"),
    ("qwen3_next", "linear_num_value_heads", None, "from 1 to"),
    ("qwen3_next", "full_attention_interval", 0, "from 1 to"),
    ("minimax_m2", "rotary_dim", "64", "from 1 to"),
    ("minimax_m2", "attn_type_list", 1, "a list"),
    ("qwen3_next", "layer_types", ["full_attention"] * 3, "for each of its 48 layers"),
    ("qwen3_next", "linear_num_value_heads", 24, "share key heads evenly"),
    ("deepseek_v32", "index_topk_freq", 4, "share one are not verified"),
    ("deepseek_v32", "index_topk_pattern", ["full", "shared"], "share one are not verified"),
    ("deepseek_v32", "indexer_rope_interleave", True, "turn these channels"),
    ("glm_moe_dsa", "indexer_types", ["full", "shared"] * 39, "share one are not verified"),
    ("glm_moe_dsa", "mlp_layer_types", ["sparse"] * 78, "dense layers first"),
    ("glm4_moe", "norm_topk_prob", False, "normalises"),
    ("glm4_moe", "tie_word_embeddings", True, "cannot save"),
    ("glm4_moe", "first_k_dense_replace", 92, "must have experts"),
    ("glm4_moe", "rope_scaling", {"type": "yarn", "factor": 4.0}, "no other"),
]


@pytest.fixture(autouse=True)
def newest_megatron(monkeypatch):
    """Rules are the same whichever version is installed, but for the one that asks for it."""
    monkeypatch.setattr(family_checks, "version", lambda name: "0.19.2")


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa", "qwen3_next"])
def test_layers_that_an_older_megatron_has_not_are_refused_with_where_to_find_them(name, monkeypatch):
    monkeypatch.setattr(family_checks, "version", lambda name: "0.16.1")
    (broken,) = FAMILIES[name].broken_rules(PUBLISHED[name])
    assert broken.rule == "needs megatron-core 0.19 or newer" and "packed sequences" in broken.reason
    assert "constraints-py312.txt" in broken.fix


@pytest.mark.parametrize("name", ["deepseek_v3", "kimi_k2"])
def test_values_wider_than_queries_are_refused_where_megatron_would_cut_them(name, monkeypatch):
    wide = PUBLISHED["kimi_k2"] | {"v_head_dim": 256}
    monkeypatch.setattr(family_checks, "version", lambda _: "0.16.1")
    assert list(FAMILIES[name].broken_rules(wide)) == []
    monkeypatch.setattr(family_checks, "version", lambda _: "0.19.2")
    (broken,) = FAMILIES[name].broken_rules(wide)
    assert broken.rule == "needs v_head_dim of at most 192 with megatron-core 0.19"


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_breaks_no_rule(name):
    assert list(FAMILIES[name].broken_rules(PUBLISHED[name])) == []
    assert FAMILIES[name].checked_config(PUBLISHED[name])["num_layers"] == PUBLISHED[name]["num_hidden_layers"]


@pytest.mark.parametrize(("family", "name", "value", "said"), BROKEN)
def test_what_megatron_would_compute_otherwise_is_refused_with_the_reason(family, name, value, said, tmp_path):
    config = PUBLISHED[family] | {name: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (problem,) = [problem for problem in checkpoint_problems(tmp_path) if "config.json" in str(problem) or name in problem.rule]
    assert said in str(problem)
    with pytest.raises(CheckpointError, match=r"^config.json: "):
        FAMILIES[family].checked_config(config)


def test_validation_knows_the_shape_of_every_family():
    glm = shape_of_config(PUBLISHED["glm4_moe"])
    assert (glm.num_kv_heads, glm.num_experts, glm.expert_ffn_size, glm.num_mtp_layers) == (8, 160, 1536, 1)
    assert (glm.dense_ffn_size, glm.shared_ffn_size) == (12288, 1536)
    assert glm.routes == RouteShape(num_layers=89, top_k=8, num_experts=160)
    assert (glm.has_expert_bias, glm.has_shared_experts, glm.has_latent_attention) == (True, True, False)
    mixtral = shape_of_config(PUBLISHED["mixtral"])
    assert (mixtral.num_experts, mixtral.expert_ffn_size, mixtral.has_expert_bias) == (8, 14336, False)
    assert mixtral.routes == RouteShape(num_layers=32, top_k=2, num_experts=8)
    kimi = shape_of_config(PUBLISHED["kimi_k2"])
    assert (kimi.num_kv_heads, kimi.has_latent_attention, kimi.has_expert_bias) == (64, True, True)
    gpt_oss = shape_of_config(PUBLISHED["gpt_oss"])
    assert gpt_oss.routes == RouteShape(num_layers=24, top_k=4, num_experts=32)
    assert gpt_oss.has_biased_experts and gpt_oss.has_sinks
    assert not any(shape_of_config(PUBLISHED[name]).has_biased_experts for name in PUBLISHED if name != "gpt_oss")
    llama = shape_of_config(PUBLISHED["llama"])
    assert (llama.num_experts, llama.expert_ffn_size, llama.routes) == (None, 0, None)
    assert (llama.dense_ffn_size, mixtral.dense_ffn_size) == (PUBLISHED["llama"]["intermediate_size"], 0)


@pytest.mark.parametrize(
    ("name", "overrides", "path", "fix"),
    [
        ("gpt_oss", ["train.layout.cp=2"], "train.layout.cp", "cp_comm_type=a2a"),
        ("gpt_oss", ["train.layout.cp=2", "+train.megatron.cp_comm_type=a2a"], None, ""),
        ("gpt_oss", ["train.layout={ranks:16,tp:8,cp:2}", "+train.megatron.cp_comm_type=a2a"], "train.layout.cp", "or a smaller tp"),
        ("gpt_oss", ["train.layout.ep=2", "train.layout.etp=2"], "train.layout.etp", "etp=1"),
        (
            "deepseek_v32",
            ["train.overlap_grad_reduce=true", "train.overlap_param_gather=true"],
            "train.overlap_param_gather",
            "overlap_param_gather=false",
        ),
        (
            "qwen3_next",
            ["train.overlap_grad_reduce=true", "train.overlap_param_gather=true"],
            "train.overlap_param_gather",
            "overlap_param_gather=false",
        ),
        ("deepseek_v32", ["train.layout.cp=2"], "train.layout.cp", "cp_comm_type=all_gather"),
        ("deepseek_v32", ["train.layout.cp=2", "+train.megatron.cp_comm_type=all_gather"], None, ""),
        ("qwen3_next", ["train.layout.tp=2"], "train.layout.tp", "tp=1"),
        ("qwen3_next", ["train.layout.cp=2"], None, ""),
    ],
)
def test_what_the_layers_of_a_family_do_not_allow_is_refused(name, overrides, path, fix, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    for file in ("tokenizer.json", "model.safetensors"):
        (tmp_path / file).touch()
    chosen = ["model.scratch=null", f"model.path={tmp_path}", "train.layout.ranks=4", *overrides]
    found: list[Problem] = []
    try:
        load(["recipe=grpo-tiny-moe-1n2g-sync", *chosen])
    except ConfigError as error:
        found = error.problems
    assert [problem.path for problem in found] == ([path] if path else [])
    assert all(fix in problem.fix for problem in found)


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name != "llama"])
def test_a_missing_base_of_the_rotary_embedding_is_named_before_anything_is_built(name, tmp_path):
    config = {key: value for key, value in PUBLISHED[name].items() if key not in ("rope_theta", "rope_parameters")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "needs 'rope_theta' in config.json" in [problem.rule for problem in checkpoint_problems(tmp_path)]


def test_llama_2_which_writes_no_base_has_that_of_transformers(tmp_path):
    config = {key: value for key, value in PUBLISHED["llama"].items() if key not in ("rope_theta", "rope_scaling")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not any("rope" in problem.rule for problem in checkpoint_problems(tmp_path))
    expected = AutoConfig.from_pretrained(tmp_path).rope_parameters["rope_theta"]
    assert FAMILIES["llama"].rotary(config)["rotary_base"] == expected == 10000.0


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "rope_scaling": LLAMA3},
        {"rope_scaling": LLAMA3, "original_max_position_embeddings": 4096},
        {"rope_scaling": None, "original_max_position_embeddings": 4096},
    ],
)
def test_of_rotary_settings_that_contradict_each_other_those_count_that_count_for_transformers(changes, tmp_path):
    config = PUBLISHED["llama"] | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = AutoConfig.from_pretrained(tmp_path)
    read.standardize_rope_params()  # as its rotary embeddings do
    assert rope_parameters(config) == read.rope_parameters


@pytest.mark.parametrize("family", ["llama", "kimi_k2", "gpt_oss"])
def test_a_rope_theta_that_transformers_would_lose_beside_a_scaling_is_asked_for(family):
    config = dict(PUBLISHED[family])
    theta = config.pop("rope_theta")
    config |= {"rope_parameters": {"rope_type": "default", "rope_theta": theta}, "rope_scaling": config.get("rope_scaling") or LLAMA3}
    with pytest.raises(CheckpointError, match="needs rope_theta beside rope_scaling"):
        FAMILIES[family].checked_config(config)
    assert FAMILIES[family].checked_config(config | {"rope_theta": theta})["num_layers"] == config["num_hidden_layers"]


def test_the_sizes_that_fp8_needs_are_called_as_config_json_calls_them():
    sizes = {linear.name: (linear.size, linear.cut_by) for linear in linear_sizes(PUBLISHED["mixtral"], trains_mtp=False)}
    assert sizes["intermediate_size"] == (14336, "etp")
    assert "moe_intermediate_size" not in sizes
    sizes = {linear.name: (linear.size, linear.cut_by) for linear in linear_sizes(PUBLISHED["glm4_moe"], trains_mtp=False)}
    assert sizes["intermediate_size"] == (12288, "tp")
    assert sizes["n_shared_experts * moe_intermediate_size"] == (1536, "tp")


# -- other architectures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "near"),
    [
        ({"model_type": "qwen4_moe"}, "the nearest is qwen3_moe"),
        ({"model_type": "glm4_moe_lite"}, "the nearest is glm4_moe"),
        ({"model_type": "custom", "architectures": ["MixtralForCausalLM"]}, "the nearest is mixtral"),
        ({"model_type": "whisper"}, "no family for model_type 'whisper'"),
        ({}, "no family for model_type 'None'"),
    ],
)
def test_an_unknown_architecture_is_refused_with_the_nearest_family_and_all_of_them(config, near, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    (problem,) = [problem for problem in checkpoint_problems(tmp_path) if "family" in problem.rule]
    assert near in str(problem)
    assert all(name in problem.fix for name in FAMILIES)
    with pytest.raises(CheckpointError, match=near):
        find_family(config)


@pytest.mark.parametrize("model_type", NOT_EXPRESSED)
def test_an_architecture_that_megatron_cannot_express_is_refused_with_what_it_lacks(model_type):
    assert model_type not in FAMILIES
    with pytest.raises(CheckpointError) as caught:
        find_family({"model_type": model_type})
    assert NOT_EXPRESSED[model_type] in str(caught.value)


def test_a_dense_qwen3_says_how_wide_its_heads_are():
    config = AutoConfig.for_model("qwen3").to_dict() | {"architectures": ["Qwen3ForCausalLM"]}
    assert not list(find_family(config).broken_rules(config))
    del config["head_dim"]
    [(rule, reason, _)] = find_family(config).broken_rules(config)
    assert rule == "needs head_dim in config.json" and "a number of its own" in reason


@pytest.mark.parametrize("file", ["hf_quant_config.json", "quantize_config.json", "quant_config.json"])
def test_a_quantizer_s_file_tells_what_config_json_does_not(file, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["mixtral"]))
    before = [problem.rule for problem in checkpoint_problems(tmp_path)]
    (tmp_path / file).write_text("{}")
    after = [problem.rule for problem in checkpoint_problems(tmp_path)]
    assert [rule for rule in after if rule not in before] == [f"must not be quantized ({file})"]


@pytest.mark.parametrize("name", [name for name, hf in PUBLISHED.items() if "kv_lora_rank" not in hf])
def test_key_value_heads_that_are_not_written_are_transformers_or_refused(name):
    hf = {key: value for key, value in PUBLISHED[name].items() if key != "num_key_value_heads"}
    told = [rule for rule, _, _ in find_family(hf).broken_rules(hf) if "num_key_value_heads" in rule]
    ours = find_family(hf).transformer_config(hf)["num_query_groups"]
    assert bool(told) == (AutoConfig.for_model(**hf).num_key_value_heads != ours)
