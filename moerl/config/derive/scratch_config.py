"""Contents of a scratch model's checkpoint, known without torch: its config.json and the vocabulary of its tokenizer."""

from typing import Any

from moerl.config.schema.model_config import ScratchModel

PAD, EOS, UNKNOWN, TURN_START, TURN_END = "<pad>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD, EOS, UNKNOWN, TURN_START, TURN_END)
CHARACTERS = "\n" + "".join(chr(code) for code in range(ord(" "), ord("~") + 1))
"""Newline and every printable ASCII character, one token each."""
TOKEN_IDS = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
VOCAB_SIZE = -(-len(TOKEN_IDS) // 64) * 64
"""Rows of the embedding: padded so that every tensor-parallel size up to 64 splits it evenly. No text maps to the last ones."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}


def scratch_config(scratch: ScratchModel, max_context: int) -> dict[str, Any]:
    """The config.json of `scratch`, with the names of the published checkpoints of its family."""
    dense = {
        "model_type": scratch.family,
        "architectures": [_ARCHITECTURES[scratch.family]],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": scratch.hidden_size,
        "intermediate_size": scratch.ffn_size,
        "num_hidden_layers": scratch.num_layers,
        "num_attention_heads": scratch.num_heads,
        "num_key_value_heads": scratch.num_kv_heads,
        "head_dim": scratch.head_dim,
        "max_position_embeddings": max_context,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": TOKEN_IDS[EOS],
        "pad_token_id": TOKEN_IDS[PAD],
        "dtype": "float32",
    }
    if scratch.family == "deepseek_v3":
        del dense["head_dim"]
        return dense | _deepseek(scratch)
    return dense if scratch.family == "qwen3" else dense | _experts(scratch)


def _experts(scratch: ScratchModel) -> dict[str, Any]:
    """Every layer is a mixture of experts, so no layer uses `intermediate_size`."""
    return {
        "num_experts": scratch.num_experts,
        "num_experts_per_tok": scratch.experts_per_token,
        "moe_intermediate_size": scratch.ffn_size,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "output_router_logits": False,
    }


def _deepseek(scratch: ScratchModel) -> dict[str, Any]:
    """One dense layer, then experts in groups of two, of which a token may use half as many as it has experts."""
    return {
        "num_key_value_heads": scratch.num_heads,
        "intermediate_size": 2 * scratch.ffn_size,
        "q_lora_rank": scratch.hidden_size // 2,
        "kv_lora_rank": scratch.hidden_size // 4,
        "qk_nope_head_dim": scratch.head_dim,
        "qk_rope_head_dim": scratch.head_dim // 2,
        "v_head_dim": scratch.head_dim,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_routed_experts": scratch.num_experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": scratch.experts_per_token,
        "moe_intermediate_size": scratch.ffn_size,
        "n_group": scratch.num_experts // 2,
        "topk_group": scratch.experts_per_token // 2,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rope_scaling": None,
        "num_nextn_predict_layers": scratch.mtp_layers,
        "tie_word_embeddings": False,
    }
