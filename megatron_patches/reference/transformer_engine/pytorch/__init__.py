"""transformer_engine.pytorch: linear layers, norms, attention, optimizer."""

from transformer_engine.pytorch import distributed, fp8, ops, optimizers, tensor
from transformer_engine.pytorch.attention import DotProductAttention
from transformer_engine.pytorch.linear import GroupedLinear, LayerNormLinear, Linear
from transformer_engine.pytorch.norm import LayerNorm, RMSNorm
from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

__all__ = ["DotProductAttention", "Float8Tensor", "GroupedLinear", "LayerNorm", "LayerNormLinear", "Linear", "RMSNorm", "distributed",
           "fp8", "ops", "optimizers", "tensor"]  # fmt: skip
