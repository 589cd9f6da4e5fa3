"""Gated delta nets over slots: the modules of transformers, whose own forward passes know one sequence a row and no padding behind it.

A token of nobody neither decays nor corrects the memory of its row; rows of nobody write nothing.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule

from moerl.rollout.engines.hf.cache import DeltaLayer, SlotCache


def run_over_slots(model: PreTrainedModel) -> None:
    for name, module in model.named_modules():
        if name.endswith(".linear_attn"):
            module.forward = partial(_forward, module)


def _forward(module: Any, hidden_states: Tensor, cache_params: SlotCache, **_: Any) -> Tensor:
    """[B, C, hidden] -> [B, C, hidden]. The tokens of a row that somebody owns come first."""
    layer, rows = cache_params.layers[module.layer_idx], cache_params.rows
    used = rows.write_at != cache_params.scratch_column  # [B, C]
    ordered = module.fix_query_key_value_ordering(module.in_proj_qkvz(hidden_states), module.in_proj_ba(hidden_states))
    query, key, value, gate, strength, decay = ordered
    mixed = torch.cat([each.flatten(2) for each in (query, key, value)], dim=-1)
    mixed = _convolve(module, mixed.transpose(1, 2), layer, rows.slots, used).transpose(1, 2)
    parts = zip(mixed.split([module.key_dim, module.key_dim, module.value_dim], dim=-1), (query, key, value), strict=True)
    query, key, value = (part.reshape(like.shape) for part, like in parts)
    repeats = module.num_v_heads // module.num_k_heads
    logs = -module.A_log.float().exp() * F.softplus(decay.float() + module.dt_bias)
    rule = torch_recurrent_gated_delta_rule if mixed.shape[1] == 1 else torch_chunk_gated_delta_rule
    out, state = rule(
        query.repeat_interleave(repeats, dim=2),
        key.repeat_interleave(repeats, dim=2),
        value,
        g=logs * used[..., None],
        beta=strength.sigmoid() * used[..., None],
        initial_state=layer.state[rows.slots],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    owned = used[:, 0]
    layer.state[rows.slots[owned]] = state[owned].float()
    return module.out_proj(module.norm(out.flatten(0, 2), gate.flatten(0, 2)).reshape(*hidden_states.shape[:2], -1))


def _convolve(module: Any, mixed: Tensor, layer: DeltaLayer, slots: Tensor, used: Tensor) -> Tensor:
    """[B, channels, C] with the inputs before it. What the next pass needs are those that end with the last token of somebody."""
    inputs = torch.cat([layer.inputs[slots], mixed], dim=-1)
    kept = used.sum(1, keepdim=True) + torch.arange(layer.inputs.shape[-1])
    last, owned = inputs.gather(2, kept[:, None].expand(-1, mixed.shape[1], -1)), used[:, 0]
    layer.inputs[slots[owned]] = last[owned]
    return F.silu(F.conv1d(inputs, module.conv1d.weight, groups=mixed.shape[1]))
