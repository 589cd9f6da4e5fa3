"""What a scratch model's checkpoint will hold, known without torch: its config.json and the vocabulary of its tokenizer."""

from typing import Any

from moerl.config.schema import ScratchModel

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


def scratch_config(scratch: ScratchModel, max_context: int) -> dict[str, Any]:
    """The config.json of `scratch`, with the names of the published Qwen3 checkpoints."""
    dense = {
        "model_type": scratch.family,
        "architectures": ["Qwen3MoeForCausalLM" if scratch.family == "qwen3_moe" else "Qwen3ForCausalLM"],
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
