"""Matrices made nearly orthogonal: pure functions."""

from collections.abc import Sequence

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of Jordan's quintic (kellerjordan.github.io/posts/muon), which brings every singular value near 1; not to 1."""
ITERATIONS = 5


def scaled_orthogonal(steps: Tensor, rows: Sequence[int], dtype: torch.dtype) -> Tensor:
    """[matrices, rows, columns], each times the square root of its longer side: the root mean square of an orthogonal one is then 1.

    `rows`: of queries, keys and values in each query group, one after the other; () for matrices that are one. `dtype` of the products.
    """
    groups = steps.shape[1] // sum(rows) if rows else 1
    parts = steps.unflatten(1, (groups, -1)).split(list(rows) or steps.shape[1], dim=2)
    longer = [max(part.shape[1] * part.shape[2], part.shape[3]) for part in parts]
    results = [
        (orthogonal(part.flatten(1, 2), dtype) * side**0.5).unflatten(1, (groups, -1)) for part, side in zip(parts, longer, strict=True)
    ]
    return torch.cat(results, dim=2).flatten(1, 2)


def orthogonal(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """[matrices, rows, columns]: the same singular vectors, and singular values near 1, by Newton-Schulz in `dtype`."""
    x = matrices / torch.linalg.matrix_norm(matrices, keepdim=True).clamp_min(1e-7)
    is_tall = x.shape[1] > x.shape[2]
    x = (x.mT if is_tall else x).to(dtype)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).to(matrices.dtype)
