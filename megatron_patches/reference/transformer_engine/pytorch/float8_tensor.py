"""Where older Transformer Engine kept Float8Tensor."""

from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

__all__ = ["Float8Tensor"]
