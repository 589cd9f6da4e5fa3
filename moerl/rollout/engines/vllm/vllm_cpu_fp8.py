"""Products with weights in FP8 blocks on a CPU. vLLM's kernels there need AMX and activations of 16 bits; they widen weights and multiply
in the dtype of activations (W8A16). So does this, by PyTorch, on every CPU and in float32 too. Weights and scales stay as they are loaded,
where the others pack them."""

from typing import Any

import torch
import torch.nn.functional as F

from moerl.models.fp8_blocks import dequantized


def prepare() -> None:
    """In every process of vLLM, where there is no GPU. Safe to call twice."""
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel, CPUFp8W8A8BlockScaledMMKernel
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    Fp8Config.get_supported_act_dtypes = lambda *_: [torch.bfloat16, torch.half, torch.float32]
    CPUFp8W8A8BlockScaledMMKernel.is_supported = lambda *_: (False, "activations stay as they are")
    CPUFp8BlockScaledMMKernel.is_supported = lambda *_: (True, None)
    CPUFp8BlockScaledMMKernel.process_weights_after_loading = lambda *_: None
    CPUFp8BlockScaledMMKernel.apply_weights = _linear
    cpu_moe.CPUExpertsFp8._supports_current_device = lambda *_: True
    cpu_moe.CPUExpertsFp8.apply = _experts
    cpu_moe.prepare_fp8_moe_layer_for_cpu = lambda w13, w2: (w13, w2)


def _linear(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None, **_: Any) -> torch.Tensor:
    """[..., in] -> [..., out]; in place of CPUFp8BlockScaledMMKernel.apply_weights."""
    return F.linear(x, _widened(layer.weight, layer.weight_scale_inv, x.dtype), bias)


def _experts(
    self: Any, *, output: torch.Tensor, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_weights: torch.Tensor,
    topk_ids: torch.Tensor, **_: Any,
) -> None:  # fmt: skip
    """Fills `output` [T, hidden]; in place of CPUExpertsFp8.apply. `w1`, gate over up: [E, 2 * inner, hidden], `w2` [E, hidden, inner]; of
    each token [T, top_k] experts and their weights."""
    x = hidden_states
    output.zero_()
    for expert in topk_ids.unique().tolist():
        rows, places = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[rows], _widened(w1[expert], self.w1_scale[expert], x.dtype)).chunk(2, dim=-1)
        down = F.linear(F.silu(gate) * up, _widened(w2[expert], self.w2_scale[expert], x.dtype))
        output.index_add_(0, rows, (down * topk_weights[rows, places, None]).to(output.dtype))


def _widened(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.cat(list(dequantized(values.data, scales.data, dtype)))
