"""What a process with the reference transformer_engine does for the tests of its FP8; values go to the test."""

from typing import Any

import numpy as np
import torch


def round_all(cases: list[tuple[np.ndarray, tuple[int, int], str, bool]]) -> list[np.ndarray]:
    """Each array in blocks of a shape, as a type, with scales that are powers of two or not."""
    from transformer_engine.common.recipe import Format
    from transformer_engine.pytorch.quantize import round_in_blocks

    types = {"e4m3": Format.E4M3.value[0], "e5m2": Format.HYBRID.value[1]}
    return [round_in_blocks(torch.from_numpy(x), block, types[name], power).numpy() for x, block, name, power in cases]


def products(recipe_name: str, x: np.ndarray, weight: np.ndarray, grad: np.ndarray) -> dict[str, np.ndarray]:
    """x W^T and its gradients through a Linear inside fp8_autocast."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    layer = te.Linear(x.shape[1], weight.shape[0], bias=False, params_dtype=torch.float32)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(weight))
    leaf = torch.from_numpy(x).requires_grad_()
    with te.fp8_autocast(enabled=True, fp8_recipe=getattr(recipe, recipe_name)(fp8_format=recipe.Format.HYBRID)):
        out = layer(leaf)
    out.backward(torch.from_numpy(grad))
    return {"out": out.detach().numpy(), "x": leaf.grad.numpy(), "weight": layer.weight.grad.numpy()}


def pad_and_unpad(splits: list[int], align: int | None) -> tuple[list[int], np.ndarray, np.ndarray]:
    from transformer_engine.pytorch import Fp8Padding, Fp8Unpadding

    rows = torch.arange(1.0, sum(splits) * 3 + 1).reshape(-1, 3)
    padded, sizes = Fp8Padding(len(splits), align)(rows, splits)
    return sizes, padded.numpy(), Fp8Unpadding(len(splits), align)(padded, splits).numpy()


def refusals() -> list[str]:
    """What each thing that FP8 cannot do says."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    layer = te.Linear(24, 16, bias=False, params_dtype=torch.float32)

    def uneven() -> Any:
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe.Float8BlockScaling()):
            return layer(torch.zeros(16, 24))

    said = []
    for attempt in (uneven, recipe.DelayedScaling, lambda: te.fp8_model_init(enabled=True).__enter__()):
        try:
            attempt()
        except RuntimeError as error:
            said.append(str(error))
    return said
