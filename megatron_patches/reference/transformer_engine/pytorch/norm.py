"""RMSNorm and LayerNorm, computed in float32, or in float64 for float64."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional


def normalize(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, kind: str, zero_centered: bool) -> torch.Tensor:
    computed = torch.promote_types(x.dtype, torch.float32)
    scale = weight.to(computed) + 1 if zero_centered else weight.to(computed)
    if kind == "RMSNorm":
        return _RMS.apply(x, scale, eps)
    out = functional.layer_norm(x.to(computed), (x.shape[-1],), scale, None if bias is None else bias.to(computed), eps)
    return out.to(x.dtype)


class _RMS(torch.autograd.Function):
    """x / sqrt(mean(x^2) + eps) * scale over the last dimension (arXiv:1910.07467), in the scale's type. It keeps x and a number a row, as
    Transformer Engine does, where autograd would keep two wide copies of x, and takes a third of the time on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:  # type: ignore[override]
        x = x.contiguous()  # not all that x may be a part of is kept
        wide = x.to(scale.dtype)
        inverse = torch.linalg.vecdot(wide, wide).unsqueeze(-1).div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, inverse, scale)
        return (wide * inverse).mul_(scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        """With n = x * inverse and g = grad * scale: inverse * (g - n * mean(g * n)), and the sum of grad * n over all rows."""
        x, inverse, scale = ctx.saved_tensors
        normal, grad = x * inverse, grad.to(scale.dtype)
        product = grad * normal
        mean = (product @ scale).unsqueeze(-1).div_(x.shape[-1])
        grad_x = (grad * scale).addcmul_(normal, mean, value=-1).mul_(inverse)
        return grad_x.to(x.dtype), product.flatten(0, -2).sum(0), None


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
