"""Rows of zeros behind each expert's tokens, so that every FP8 product has the height it needs, and their removal."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from transformer_engine.pytorch.fp8 import FP8GlobalStateManager


class _Padded(nn.Module):
    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size

    def _padded(self, sizes: list[int]) -> list[int]:
        """MXFP8 needs 32 rows, the other recipes 16."""
        assert len(sizes) == self.num_gemms, "Number of splits should match number of GEMMs."
        align = self.align_size
        if align is None:
            align = 32 if FP8GlobalStateManager.get_fp8_recipe().mxfp8() else 16
        return [-(-size // align) * align for size in sizes]


class Fp8Padding(_Padded):
    def forward(self, inp: Tensor, m_splits: list[int]) -> tuple[Tensor, list[int]]:
        """[sum of m_splits, width] -> [sum of the padded sizes, width], and the padded sizes."""
        padded = self._padded(m_splits)
        pieces = zip(inp.split(m_splits), m_splits, padded, strict=True)
        return torch.cat([functional.pad(piece, (0, 0, 0, wanted - size)) for piece, size, wanted in pieces]), padded


class Fp8Unpadding(_Padded):
    def forward(self, inp: Tensor, m_splits: list[int]) -> Tensor:
        """The reverse: `m_splits` are the sizes before padding."""
        pieces = zip(inp.split(self._padded(m_splits)), m_splits, strict=True)
        return torch.cat([piece[:size] for piece, size in pieces])
