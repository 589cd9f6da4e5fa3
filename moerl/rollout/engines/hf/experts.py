"""Mixture-of-experts layers whose result for a token does not depend on the other tokens of the batch.

The usual implementations gather each expert's tokens, so the shapes of the matrix products, and with them the last bits, depend on
where the neighbours were routed. Here every expert sees every row: fixed shapes, E / top_k times the work.
"""

from typing import Any

import torch
import torch.nn.functional as F

EXPERTS = "moerl_invariant"
"""The name under which `every_expert_on_every_row` is registered with transformers."""


def every_expert_on_every_row(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """[T, hidden] and the router's [T, top_k] indices and weights -> [T, hidden]. `self` is the transformers module of fused experts."""
    num_experts = self.gate_up_proj.shape[0]
    weights = hidden_states.new_zeros(len(hidden_states), num_experts).scatter_(1, top_k_index, top_k_weights)
    out = torch.zeros_like(hidden_states)
    for expert in range(num_experts):
        gated = self._apply_gate(_project(self, "gate_up_proj", expert, hidden_states))
        out.addcmul_(_project(self, "down_proj", expert, gated), weights[:, expert : expert + 1])
    return out


def _project(module: Any, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
    weight, bias = getattr(module, name)[expert], getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    return F.linear(x, weight.T if module.is_transposed else weight, bias)
