"""Cost of a sequence, as far as balancing needs it: attention against everything else.

Megatron is not imported: the driver plans too.
"""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def sequence_costs(lengths: np.ndarray, attention_tokens: float) -> np.ndarray:
    """In tokens: the length, and causal attention, which costs as much as the rest at a length of `attention_tokens`."""
    return lengths + lengths.astype(np.float64) ** 2 / attention_tokens


def attention_tokens(config: "TransformerConfig", vocab_size: int) -> float:
    """Length at which causal attention costs as many operations as all matrix products with weights, which do not depend on length.

    A token takes 2 operations per weight it meets, and 2 * heads * (key width + value width) per token it attends to: on average
    half of its sequence.
    """
    delta_nets = sum(config.linear_attention_freq) if isinstance(config.linear_attention_freq, list) else 0
    per_position = (config.num_layers - delta_nets) * config.num_attention_heads * sum(_head_widths(config)) / 2
    return (config.num_layers * _attention_weights(config) + _mlp_weights(config) + config.hidden_size * vocab_size) / per_position


def _head_widths(config: "TransformerConfig") -> tuple[int, int]:
    """Widths of a head: keys, values."""
    if config.multi_latent_attention:
        return config.qk_head_dim + config.qk_pos_emb_head_dim, config.v_head_dim
    return config.kv_channels, config.kv_channels


def _attention_weights(config: "TransformerConfig") -> int:
    """Weights of one layer."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    key, value = _head_widths(config)
    if not config.multi_latent_attention:
        groups = config.num_query_groups if config.num_query_groups is not None else heads
        return hidden * (2 * heads * key + 2 * groups * key)
    query_rank, latent, rotary = config.q_lora_rank, config.kv_lora_rank, config.qk_pos_emb_head_dim
    query = hidden * heads * key if query_rank is None else query_rank * (hidden + heads * key)
    return query + hidden * (latent + rotary) + latent * heads * (key - rotary + value) + heads * value * hidden


def _mlp_weights(config: "TransformerConfig") -> int:
    """Weights of all layers: the experts a token goes to, shared ones and the router in its mixture layers, the MLP in the others."""
    matrices = 3 if config.gated_linear_unit else 2
    dense = matrices * config.hidden_size * config.ffn_hidden_size
    if config.num_moe_experts is None:
        return config.num_layers * dense
    shared = config.moe_shared_expert_intermediate_size
    width = config.moe_router_topk * config.moe_ffn_hidden_size + (0 if shared is None else shared)
    mixture = config.hidden_size * (matrices * width + config.num_moe_experts)
    num_mixtures = len(mixture_layers(config))
    return num_mixtures * mixture + (config.num_layers - num_mixtures) * dense


def mixture_layers(config: "TransformerConfig") -> list[int]:
    """Layers with experts, counted from 0 over the whole model."""
    if config.num_moe_experts is None:
        return []
    frequency = config.moe_layer_freq
    pattern = frequency if isinstance(frequency, list) else [int(layer % frequency == 0) for layer in range(config.num_layers)]
    return [layer for layer, is_mixture in enumerate(pattern) if is_mixture]
