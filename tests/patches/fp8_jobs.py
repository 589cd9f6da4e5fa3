"""FP8 in the layers of the reference Transformer Engine, run in a patched process; rank 0's value goes to the test."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

Arrays = dict[str, np.ndarray]


def recipe_named(name: str, kind: str = "e4m3", **options: Any) -> Any:
    from transformer_engine.common import recipe

    chosen = recipe.Format.E4M3 if kind == "e4m3" else recipe.Format.HYBRID
    if name == "blockwise-float32":
        return recipe.Float8BlockScaling(fp8_format=chosen, use_f32_scales=True)
    classes = {
        "blockwise": recipe.Float8BlockScaling,
        "mxfp8": recipe.MXFP8BlockScaling,
        "tensorwise": recipe.Float8CurrentScaling,
        "delayed": recipe.DelayedScaling,
    }
    return classes[name](fp8_format=chosen, **options)


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().float().numpy().copy()


def _run(layer: Any, x: torch.Tensor, grad: torch.Tensor, recipe: Any, *args: Any) -> torch.Tensor:
    import transformer_engine.pytorch as te

    with te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
        y = layer(x, *args)
    y.backward(grad)
    return y


def linears(x: np.ndarray, weight: np.ndarray, grad: np.ndarray, cases: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Arrays]:
    return {case: linear(x, weight, grad, *case, with_norm=False) for case in cases}


def linear(x: np.ndarray, weight: np.ndarray, grad: np.ndarray, name: str, kind: str, with_norm: bool) -> Arrays:
    """Output and gradients of one layer; with_norm: of LayerNormLinear, and what its norm gave."""
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.norm import normalize

    options = {"bias": False, "params_dtype": torch.float32}
    layer = (
        te.LayerNormLinear(*weight.shape[::-1], normalization="RMSNorm", **options)
        if with_norm
        else te.Linear(*weight.shape[::-1], **options)
    )
    layer.weight.data = torch.from_numpy(weight)
    source = torch.from_numpy(x).requires_grad_()
    y = _run(layer, source, torch.from_numpy(grad), recipe_named(name, kind))
    normed = normalize(source, layer.layer_norm_weight, None, layer.eps, "RMSNorm", False) if with_norm else source
    return {"y": _numpy(y), "weight": _numpy(layer.weight.grad), "x": _numpy(source.grad), "normed": _numpy(normed)}


def groups(x: np.ndarray, weights: np.ndarray, grad: np.ndarray, sizes: Sequence[int], names: Sequence[str]) -> dict[str, Arrays]:
    return {name: grouped(x, weights, grad, sizes, name, "e4m3") for name in names}


def grouped(x: np.ndarray, weights: np.ndarray, grad: np.ndarray, sizes: Sequence[int], name: str, kind: str) -> Arrays:
    """Experts with `sizes` tokens, padded as the recipe wants and cut again."""
    import transformer_engine.pytorch as te

    recipe = recipe_named(name, kind)
    layer = te.GroupedLinear(len(weights), *weights.shape[:0:-1], bias=False, params_dtype=torch.float32)
    for index, weight in enumerate(weights):
        getattr(layer, f"weight{index}").data = torch.from_numpy(weight)
    source = torch.from_numpy(x).requires_grad_()
    with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
        padded, padded_sizes = te.Fp8Padding(len(sizes))(source, list(sizes))
        y = te.Fp8Unpadding(len(sizes))(layer(padded, padded_sizes), list(sizes))
    y.backward(torch.from_numpy(grad))
    of_weights = np.stack([_numpy(getattr(layer, f"weight{i}").grad) for i in range(len(weights))])
    return {"y": _numpy(y), "x": _numpy(source.grad), "weights": of_weights, "sizes": np.array(padded_sizes)}


def run_shape(rows: int, into: int, out: int, name: str) -> None:
    """Forward and backward of a layer of these sizes."""
    import transformer_engine.pytorch as te

    layer = te.Linear(into, out, bias=False, params_dtype=torch.float32)
    _run(layer, torch.ones(rows, into, requires_grad=True), torch.ones(rows, out), recipe_named(name))


def errors_of(function: Any, cases: Sequence[tuple[Any, ...]]) -> list[str]:
    """What `function` said when called with each case; empty where it did not object."""
    messages = []
    for case in cases:
        try:
            function(*case)
            messages.append("")
        except (AssertionError, RuntimeError) as error:
            messages.append(str(error))
    return messages


def fp8_off_outside() -> dict[str, bool]:
    """Whether products are exact: before, inside, in a region switched off inside, and after an autocast."""
    import transformer_engine.pytorch as te

    layer = te.Linear(32, 16, bias=False, params_dtype=torch.float32)
    torch.nn.init.normal_(layer.weight)
    x = torch.randn(16, 32)

    def exact() -> bool:
        return bool(torch.equal(layer(x), x @ layer.weight.T))

    before = exact()
    with te.fp8_autocast(enabled=True, fp8_recipe=recipe_named("blockwise")):
        inside = exact()
        with te.fp8_autocast(enabled=False):
            switched_off = exact()
        again = exact()
    return {"before": before, "inside": inside, "switched_off": switched_off, "again": again, "after": exact()}


def delayed_passes(x: np.ndarray, num_passes: int, algorithm: str, length: int) -> list[tuple[float, float, float, np.ndarray]]:
    """Per pass over x * (pass + 1): scales of input, weight and gradient that the next pass uses, and the output."""
    import transformer_engine.pytorch as te

    recipe = recipe_named("delayed", "hybrid", amax_compute_algo=algorithm, amax_history_len=length)
    layer = te.Linear(x.shape[1], 16, bias=False, params_dtype=torch.float32)
    layer.weight.data.fill_(0.5)
    answers = []
    for number in range(num_passes):
        source = torch.from_numpy(x * (number + 1)).requires_grad_()
        y = _run(layer, source, torch.full((len(x), 16), 0.25 / (number + 1)), recipe)
        scales = layer._delayed
        answers.append((float(scales.scale_fwd[0]), float(scales.scale_fwd[1]), float(scales.scale_bwd[0]), _numpy(y)))
    return answers


def delayed_scales_of_ranks() -> list[tuple[float, float]]:
    """(input, gradient) scales of every rank, whose inputs are rank + 1 and gradients 1 / (rank + 1)."""
    import transformer_engine.pytorch as te

    layer = te.Linear(16, 16, bias=False, params_dtype=torch.float32)
    layer.weight.data.fill_(1.0)
    rank, recipe = dist.get_rank(), recipe_named("delayed")
    x = torch.full((16, 16), float(rank + 1), requires_grad=True)
    with te.fp8_autocast(enabled=True, fp8_recipe=recipe, fp8_group=dist.group.WORLD):
        y = layer(x)
    y.backward(torch.full((16, 16), 1.0 / (rank + 1)))
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, (float(layer._delayed.scale_fwd[0]), float(layer._delayed.scale_bwd[0])))
    return answers


def delayed_state_round_trip() -> tuple[bool, bool]:
    """Whether a new grouped layer that loads the state, whole or expert by expert as in checkpoints, has the same scales."""
    import transformer_engine.pytorch as te
    from megatron.core.extensions.transformer_engine import TEGroupedLinear

    recipe = recipe_named("delayed", amax_history_len=3)
    first, whole = (te.GroupedLinear(2, 16, 16, bias=False, params_dtype=torch.float32) for _ in range(2))
    for index in range(2):
        getattr(first, f"weight{index}").data.fill_(index + 1.0)
    for _ in range(2):
        x = torch.randn(32, 16, requires_grad=True)
        _run(first, x, torch.ones(32, 16), recipe, [16, 16])
    whole.load_state_dict(first.state_dict())

    def same(other: Any) -> bool:
        names = ("scale_fwd", "scale_bwd", "amax_history_fwd", "amax_history_bwd")
        return all(torch.equal(getattr(first._delayed, name), getattr(other._delayed, name)) for name in names)

    # Megatron's own functions on the reference's state, without the rest of its layer.
    first._decode_extra_state = TEGroupedLinear._decode_extra_state.__get__(first)
    first._encode_extra_state = TEGroupedLinear._encode_extra_state.__get__(first)
    pieces = TEGroupedLinear._split_extra_state(first, first.get_extra_state())
    parts = [first._decode_extra_state(piece) for piece in pieces]
    joined = torch.cat([part["scale_fwd"].view(-1, 1) for part in parts], dim=1).view(-1)
    return same(whole), bool(torch.equal(joined, first._delayed.scale_fwd))


def recomputed(name: str) -> tuple[Arrays, Arrays]:
    """Output and gradients of two layers, plain and through Transformer Engine's checkpoint."""
    import transformer_engine.pytorch as te
    from megatron.core import tensor_parallel
    from transformer_engine.pytorch.distributed import checkpoint

    tensor_parallel.random.initialize_rng_tracker()
    generator = torch.Generator().manual_seed(0)
    layers = torch.nn.Sequential(*(te.Linear(32, 32, bias=False, params_dtype=torch.float32) for _ in range(2)))
    for layer in layers:
        layer.weight.data = torch.randn(32, 32, generator=generator)
    start, grad = (torch.randn(32, 32, generator=generator) for _ in range(2))

    def run(through: Any) -> Arrays:
        layers.zero_grad()
        x = start.clone().requires_grad_()
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe_named(name)):
            y = through(x)
        y.backward(grad)
        return {"y": _numpy(y), "x": _numpy(x.grad), "weight": _numpy(layers[0].weight.grad)}

    return run(layers), run(lambda x: checkpoint(layers, x, distribute_saved_activations=False))


def build_with(kind: str, option: str, value: Any) -> None:
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    if kind == "model_init":
        with te.fp8_model_init(enabled=True):
            return
    if kind in ("DelayedScaling", "Float8CurrentScaling"):
        getattr(recipe, kind)(**{option: value})
        return
    shape = (1, 16, 16) if kind == "GroupedLinear" else (16, 16)
    getattr(te, kind)(*shape, **{option: value})
