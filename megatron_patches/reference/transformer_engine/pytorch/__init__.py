"""transformer_engine.pytorch: linear layers, norms, attention, optimizer."""

from transformer_engine.pytorch import distributed, fp8, ops, optimizers, tensor
from transformer_engine.pytorch.attention import DotProductAttention
from transformer_engine.pytorch.fp8 import fp8_autocast, fp8_model_init
from transformer_engine.pytorch.linear import GroupedLinear, LayerNormLinear, Linear
from transformer_engine.pytorch.norm import LayerNorm, RMSNorm
from transformer_engine.pytorch.padding import Fp8Padding, Fp8Unpadding
from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

__all__ = ["DotProductAttention", "Float8Tensor", "Fp8Padding", "Fp8Unpadding", "GroupedLinear", "LayerNorm", "LayerNormLinear",
           "Linear", "RMSNorm", "distributed", "fp8", "fp8_autocast", "fp8_model_init", "ops", "optimizers", "tensor"]  # fmt: skip
