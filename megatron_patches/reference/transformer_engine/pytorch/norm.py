"""RMSNorm and LayerNorm, computed in float32, or in float64 for float64."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional


def normalize(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, kind: str, zero_centered: bool) -> torch.Tensor:
    computed = torch.promote_types(x.dtype, torch.float32)
    scale = weight.to(computed) + 1 if zero_centered else weight.to(computed)
    wide = x.to(computed)
    if kind == "RMSNorm":
        out = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * scale
    else:
        out = functional.layer_norm(wide, (x.shape[-1],), scale, None if bias is None else bias.to(computed), eps)
    return out.to(x.dtype)


class _Norm(nn.Module):
    kind: str

    def __init__(self, normalized_shape: int | None = None, eps: float = 1e-5, sequence_parallel: bool = False, params_dtype: Any = None,
                 zero_centered_gamma: bool = False, device: Any = "cpu", hidden_size: int | None = None, **_: Any) -> None:  # fmt: skip
        super().__init__()
        size = normalized_shape if normalized_shape is not None else hidden_size
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        start = torch.zeros if zero_centered_gamma else torch.ones
        self.weight = nn.Parameter(start(size, device=device, dtype=params_dtype))
        self.weight.sequence_parallel = sequence_parallel
        self.bias: nn.Parameter | None = None
        if self.kind == "LayerNorm":
            self.bias = nn.Parameter(torch.zeros(size, device=device, dtype=params_dtype))
            self.bias.sequence_parallel = sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return normalize(x, self.weight, self.bias, self.eps, self.kind, self.zero_centered_gamma)


class RMSNorm(_Norm):
    kind = "RMSNorm"


class LayerNorm(_Norm):
    kind = "LayerNorm"
