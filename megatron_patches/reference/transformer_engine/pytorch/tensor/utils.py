"""Names Megatron's FP8 parameter handling imports; calling one raises."""

from typing import Any


def replace_raw_data(*_: Any, **__: Any) -> None:
    raise RuntimeError("FP8 parameters need Transformer Engine on a GPU")


def cast_master_weights_to_fp8(*_: Any, **__: Any) -> None:
    raise RuntimeError("FP8 parameters need Transformer Engine on a GPU")
