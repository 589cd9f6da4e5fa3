"""Names of the tensors that published FP8 checkpoints quantize, and the size of their blocks. Imports no torch, for those who check a
configuration."""

import re

BLOCK = 128
"""Rows, and columns, that share a scale."""
SCALE_SUFFIX = "_scale_inv"

_LINEAR = re.compile(r".*(_proj|_proj_with_mqa|indexer\.wk|indexer\.wq_b|experts\.\d+\.w[123])\.weight")
_HIGH_PRECISION = re.compile(r".*(eh_proj|weights_proj)\.weight")


def is_quantized_when_published(name: str, shape: tuple[int, ...]) -> bool:
    """Projections of attention and MLPs; not embeddings, the output layer, norms, routers and what joins multi-token prediction."""
    return len(shape) == 2 and _LINEAR.fullmatch(name) is not None and _HIGH_PRECISION.fullmatch(name) is None


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-size // BLOCK) for size in shape)
