"""Names that Megatron imports for its fused-MLP path (use_transformer_engine_op_fuser); building one raises."""

from typing import Any


class Sequential:
    """Only named in annotations."""


class FusibleOperation:
    def __init__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("te.ops need Transformer Engine on a GPU; leave use_transformer_engine_op_fuser off")


class SwiGLU(FusibleOperation): ...


class GEGLU(FusibleOperation): ...


class ReGLU(FusibleOperation): ...


class GELU(FusibleOperation): ...


class ReLU(FusibleOperation): ...
