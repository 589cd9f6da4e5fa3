"""Products that SGLang lacks to compute with weights in FP8 blocks on CPUs: its own kernels there need AMX, widen weights and multiply in
the dtype of activations (W8A16); so does this, by PyTorch. Weights and scales stay as loaded, as Hopper's kernels take them."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F


def prepare() -> None:
    """Once sglang is there."""
    from sglang.srt.layers.quantization import fp8, fp8_utils
    from sglang.srt.models.deepseek_common import deepseek_weight_loader

    fp8._is_cpu = False
    fp8.Fp8LinearMethod.apply = _linear
    fp8.Fp8MoEMethod.apply = _experts
    fp8.Fp8Config.get_supported_act_dtypes = lambda *_: [torch.bfloat16, torch.half, torch.float32]
    # The parts of latent attention that it multiplies by itself are widened as on GPUs, here to the model's dtype.
    deepseek_weight_loader._is_xpu = True
    deepseek_weight_loader.block_quant_dequant = lambda values, scales, block, _: fp8_utils.block_quant_dequant(
        values, scales, block, torch.get_default_dtype()
    )


def _linear(self: Any, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[..., in] -> [..., out]; in place of Fp8LinearMethod.apply."""
    return F.linear(x, _widened(self, layer, "weight", x.dtype), bias)


def _experts(self: Any, layer: Any, dispatch_output: Any) -> Any:
    """In place of Fp8MoEMethod.apply."""
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

    dtype = dispatch_output.hidden_states.dtype
    names = ("w13_weight", "w2_weight")
    plain = SimpleNamespace(num_experts=layer.num_experts, **{name: _widened(self, layer, name, dtype) for name in names})
    return UnquantizedFusedMoEMethod.forward_cpu(self, plain, dispatch_output)


def _widened(method: Any, layer: torch.nn.Module, name: str, dtype: torch.dtype) -> torch.Tensor:
    from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant

    return block_quant_dequant(getattr(layer, name), getattr(layer, f"{name}_scale_inv"), method.weight_block_size, dtype)
