"""The config.json of published models, one for each of several families, as far as it says what is computed."""

_DECODER = {"rms_norm_eps": 1e-5, "initializer_range": 0.02, "hidden_act": "silu", "tie_word_embeddings": False}
LLAMA3 = {
    "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3",
}  # fmt: skip
_YARN = {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"}
GPT_OSS_ROPE = {
    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False,
}  # fmt: skip
PUBLISHED = {
    "qwen2": {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "max_position_embeddings": 32768, "max_window_layers": 28, "use_sliding_window": False,
        "sliding_window": 131072, "rope_theta": 1000000.0, "vocab_size": 152064,
    },
    "llama": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 131072, "attention_bias": False, "mlp_bias": False, "rope_theta": 500000.0,
        "rope_scaling": LLAMA3, "vocab_size": 128256,
    },
    "mixtral": {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 32768, "num_local_experts": 8, "num_experts_per_tok": 2,
        "sliding_window": None, "rope_theta": 1000000.0, "vocab_size": 32000,
    },
    "kimi_k2": {
        "model_type": "kimi_k2", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
        "num_attention_heads": 64, "num_key_value_heads": 64, "max_position_embeddings": 131072, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 384, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.827,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "first_k_dense_replace": 1, "moe_layer_freq": 1, "attention_bias": False,
        "num_nextn_predict_layers": 0, "rope_theta": 50000.0, "rope_scaling": _YARN | {"original_max_position_embeddings": 4096},
        "rms_norm_eps": 1e-6, "vocab_size": 163840,
    },
    "glm4_moe": {
        "model_type": "glm4_moe", "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 92,
        "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "attention_bias": True,
        "use_qk_norm": True, "partial_rotary_factor": 0.5, "n_routed_experts": 160, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3,
        "num_nextn_predict_layers": 1, "rope_theta": 1000000, "rope_scaling": None, "vocab_size": 151552,
    },
    "gpt_oss": {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072, "attention_bias": True, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "num_local_experts": 32, "num_experts_per_tok": 4,
        "experts_per_token": 4, "swiglu_limit": 7.0, "rope_theta": 150000, "rope_scaling": GPT_OSS_ROPE, "vocab_size": 201088,
    },
    "minimax_m2": {
        "model_type": "minimax_m2", "hidden_size": 3072, "intermediate_size": 1536, "mlp_intermediate_size": 8192, "num_hidden_layers": 62,
        "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "rotary_dim": 64, "max_position_embeddings": 196608,
        "num_local_experts": 256, "num_experts_per_tok": 8, "attn_type_list": [1] * 62, "qk_norm_type": "per_layer", "use_qk_norm": True,
        "scoring_func": "sigmoid", "use_routing_bias": True, "shared_intermediate_size": 0, "router_jitter_noise": 0.0, "use_mtp": True,
        "num_mtp_modules": 3, "rms_norm_eps": 1e-6, "rope_theta": 5000000, "sliding_window": None, "vocab_size": 200064,
    },
    "qwen3_next": {
        "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120, "moe_intermediate_size": 512, "num_hidden_layers": 48,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 262144, "num_experts": 512,
        "num_experts_per_tok": 10, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": False,
        "shared_expert_intermediate_size": 512, "full_attention_interval": 4, "partial_rotary_factor": 0.25, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
        "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 10000000, "vocab_size": 151936,
    },
    "deepseek_v32": {
        "model_type": "deepseek_v32", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "max_position_embeddings": 163840,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "first_k_dense_replace": 3, "moe_layer_freq": 1, "attention_bias": False,
        "num_nextn_predict_layers": 1, "rope_theta": 10000, "rms_norm_eps": 1e-6, "vocab_size": 129280,
        "rope_scaling": _YARN | {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096},
    },
    "glm_moe_dsa": {
        "model_type": "glm_moe_dsa", "hidden_size": 6144, "intermediate_size": 12288, "moe_intermediate_size": 2048,
        "num_hidden_layers": 78, "num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 64, "max_position_embeddings": 202752,
        "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "qk_head_dim": 256, "v_head_dim": 256,
        "index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048, "indexer_rope_interleave": True, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "first_k_dense_replace": 3,
        "moe_layer_freq": 1, "attention_bias": False, "num_nextn_predict_layers": 1, "rope_interleave": True,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "vocab_size": 154880,
    },
}  # fmt: skip
"""As published with Qwen2.5-7B, Llama-3.1-8B, Mixtral-8x7B, GLM-4.5, Qwen3-Next-80B-A3B,
GLM-5; without quantization_config Kimi-K2, gpt-oss-20b, MiniMax-M2, DeepSeek-V3.2."""
PUBLISHED = {name: _DECODER | config for name, config in PUBLISHED.items()}
