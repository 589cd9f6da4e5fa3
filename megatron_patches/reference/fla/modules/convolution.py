"""Convolution of each channel with its own last positions."""

from typing import Any

import torch
from torch.nn import functional

from fla.ops.gated_delta_rule import sequences


def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None,
    cu_seqlens: torch.Tensor | None = None, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """x [B, T, channels], weight [channels, width]. `cu_seqlens`: ends of the sequences that one row holds."""
    if activation not in (None, "silu", "swish"):
        raise NotImplementedError(f"activation {activation!r}")
    width = weight.shape[1]
    out = [
        functional.conv1d(functional.pad(part.transpose(1, 2), (width - 1, 0)), weight[:, None], bias, groups=len(weight)).transpose(1, 2)
        for part in sequences(x, cu_seqlens)
    ]
    joined = torch.cat(out, dim=1)
    return (joined if activation is None else functional.silu(joined)), None
