"""Linear, LayerNormLinear and GroupedLinear with Megatron's tensor and sequence parallelism.

Weights are [out, in]. column: rows of the weight are split over tp; row: its columns. Communication goes through
Megatron's own autograd functions, so forward and backward match its native layers. Under an FP8 autocast the products take FP8
operands. Sequence parallelism gathers before the cast: with whole blocks per rank (moerl pads so) the numbers are those of Transformer
Engine, which casts first and gathers FP8. Weights are cast at every use, not once per mini-batch: only delayed scales could tell.
"""

import pickle
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.delayed import DelayedScales
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager
from transformer_engine.pytorch.norm import normalize
from transformer_engine.pytorch.quantized_linear import Quantizers, quantized_linear, quantizers, types

_HARMLESS = {"rng_tracker_name", "ub_name", "name"}
"""Arguments that name things and change no number."""


class _AfterBackward(torch.autograd.Function):
    """Identity whose backward pass, which follows that of everything computed from it, updates the delayed scales of gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return grad


class _TensorParallel(nn.Module):
    """What the three layers share: sizes of the local shard, communication before and after, the empty extra state."""

    def _set_up(self, in_features: int, out_features: int, *, tp_group: Any, tp_size: int, parallel_mode: str | None,
                sequence_parallel: bool, bias: bool, return_bias: bool, fuse_wgrad_accumulation: bool,
                unsupported: dict[str, Any], num_gemms: int = 1) -> tuple[int, int]:  # fmt: skip
        if fuse_wgrad_accumulation:
            raise RuntimeError("gradient_accumulation_fusion needs Transformer Engine on a GPU")
        if asked := sorted(name for name, value in unsupported.items() if value and name not in _HARMLESS):
            raise RuntimeError(f"options {asked} of linear layers need Transformer Engine on a GPU")
        self.in_features, self.out_features = in_features, out_features
        self.tp_group, self.tp_size, self.parallel_mode = tp_group, tp_size, parallel_mode
        self.sequence_parallel = sequence_parallel and tp_size > 1
        self.use_bias, self.return_bias = bias, return_bias
        self.num_gemms = num_gemms
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False, "recipe": None}
        self.fp8 = self.fp8_calibration = False
        self._delayed: DelayedScales | None = None
        # Megatron sets it where the input is kept anyway or discarded. Here the cast operands are kept, which serves both.
        self.save_original_input = False
        return out_features // (tp_size if parallel_mode == "column" else 1), in_features // (tp_size if parallel_mode == "row" else 1)

    def get_extra_state(self) -> torch.Tensor:
        """Delayed scales are the only state FP8 has."""
        return torch.empty(0, dtype=torch.uint8) if self._delayed is None else self._delayed.to_bytes()

    def set_extra_state(self, state: Any) -> None:
        if isinstance(state, torch.Tensor) and state.numel():
            recipe = pickle.loads(state.cpu().numpy().tobytes())["recipe"]
            if isinstance(recipe, DelayedScaling):
                self._delayed_scales(recipe).load_bytes(state)

    def _delayed_scales(self, recipe: DelayedScaling) -> DelayedScales:
        if self._delayed is None:
            self._delayed = DelayedScales(recipe, self.num_gemms, next(self.parameters()).device)
            self.fp8_meta |= {"fp8_checkpoint": True, "recipe": recipe}
        return self._delayed

    def set_tensor_parallel_group(self, group: Any) -> None:
        self.tp_group = group

    def backward_dw(self) -> None:
        raise RuntimeError("delay_wgrad_compute needs Transformer Engine on a GPU")

    def _new_weight(self, out: int, into: int, device: Any, dtype: Any, init: Any) -> nn.Parameter:
        weight = nn.Parameter(torch.empty(out, into, device=device, dtype=dtype))
        if init is not None and weight.device.type != "meta":
            with torch.no_grad():
                init(weight)
        weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, 1 if self.parallel_mode == "row" else 0, 1
        return weight

    def _new_bias(self, out: int, device: Any, dtype: Any) -> nn.Parameter:
        bias = nn.Parameter(torch.zeros(out, device=device, dtype=dtype))
        if self.parallel_mode == "column":
            bias.tensor_model_parallel, bias.partition_dim, bias.partition_stride = True, 0, 1
        if self.parallel_mode == "row":
            bias.sequence_parallel = self.sequence_parallel
        return bias

    def _before(self, x: torch.Tensor) -> torch.Tensor:
        from megatron.core.tensor_parallel import mappings

        if self.parallel_mode != "column" or self.tp_size == 1:
            return x
        if self.sequence_parallel:
            return mappings.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=self.tp_group)
        return mappings.copy_to_tensor_model_parallel_region(x, group=self.tp_group)

    def _after(self, y: torch.Tensor) -> torch.Tensor:
        from megatron.core.tensor_parallel import mappings

        if self.parallel_mode != "row" or self.tp_size == 1:
            return y
        if self.sequence_parallel:
            return mappings.reduce_scatter_to_sequence_parallel_region(y, group=self.tp_group)
        return mappings.reduce_from_tensor_model_parallel_region(y, group=self.tp_group)

    def _quantizers(self) -> list[Quantizers] | None:
        """Of each GEMM; None outside of FP8."""
        if not FP8GlobalStateManager.is_fp8_enabled():
            return None
        recipe = FP8GlobalStateManager.get_fp8_recipe()
        if not isinstance(recipe, DelayedScaling):
            return [quantizers(recipe)] * self.num_gemms
        scales, (forward, backward) = self._delayed_scales(recipe), types(recipe)
        FP8GlobalStateManager.register(scales)
        kinds = (("input", forward), ("weight", forward), ("grad", backward))
        return [Quantizers(*(scales.quantizer(kind, gemm, dtype) for kind, dtype in kinds), multiple=0) for gemm in range(self.num_gemms)]

    def _watched(self, x: torch.Tensor) -> torch.Tensor:
        """The first module of an autocast is the last of its backward pass."""
        manager = FP8GlobalStateManager
        watches = manager.is_fp8_enabled() and manager.is_first_fp8_module() and manager.get_fp8_recipe().delayed()
        return _AfterBackward.apply(x) if watches else x

    def _project(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        """x W^T (+ bias after the reduction, so that a row-parallel bias is added once)."""
        chosen = self._quantizers()
        x = self._before(self._watched(x))
        y = self._after(functional.linear(x, weight) if chosen is None else quantized_linear(x, weight, chosen[0]))
        if self.return_bias:
            return y, bias
        return y if bias is None else y + bias


class Linear(_TensorParallel):
    def __init__(self, in_features: int, out_features: int, sequence_parallel: bool = False, fuse_wgrad_accumulation: bool = False,
                 tp_group: Any = None, tp_size: int = 1, get_rng_state_tracker: Any = None, init_method: Any = None, bias: bool = True,
                 return_bias: bool = False, parallel_mode: str | None = None, params_dtype: Any = None, device: Any = "cpu",
                 **unsupported: Any) -> None:  # fmt: skip
        super().__init__()
        out, into = self._set_up(in_features, out_features, tp_group=tp_group, tp_size=tp_size, parallel_mode=parallel_mode,
                                 sequence_parallel=sequence_parallel, bias=bias, return_bias=return_bias,
                                 fuse_wgrad_accumulation=fuse_wgrad_accumulation, unsupported=unsupported)  # fmt: skip
        self.weight = self._new_weight(out, into, device, params_dtype, init_method)
        self.bias = self._new_bias(out, device, params_dtype) if bias else None

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None, **_: Any) -> Any:
        return self._project(x, self.weight, self.bias)


class LayerNormLinear(_TensorParallel):
    def __init__(self, in_features: int, out_features: int, eps: float = 1e-5, sequence_parallel: bool = False,
                 fuse_wgrad_accumulation: bool = False, tp_group: Any = None, tp_size: int = 1, get_rng_state_tracker: Any = None,
                 init_method: Any = None, bias: bool = True, return_bias: bool = False, parallel_mode: str | None = None,
                 return_layernorm_output: bool = False, zero_centered_gamma: bool = False, normalization: str = "LayerNorm",
                 params_dtype: Any = None, device: Any = "cpu", **unsupported: Any) -> None:  # fmt: skip
        super().__init__()
        if return_layernorm_output:
            raise RuntimeError("return_layernorm_output needs Transformer Engine on a GPU")
        out, into = self._set_up(in_features, out_features, tp_group=tp_group, tp_size=tp_size, parallel_mode=parallel_mode,
                                 sequence_parallel=sequence_parallel, bias=bias, return_bias=return_bias,
                                 fuse_wgrad_accumulation=fuse_wgrad_accumulation, unsupported=unsupported)  # fmt: skip
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        start = torch.zeros if zero_centered_gamma else torch.ones
        self.layer_norm_weight = nn.Parameter(start(in_features, device=device, dtype=params_dtype))
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel
        self.layer_norm_bias: nn.Parameter | None = None
        if normalization == "LayerNorm":
            self.layer_norm_bias = nn.Parameter(torch.zeros(in_features, device=device, dtype=params_dtype))
            self.layer_norm_bias.sequence_parallel = self.sequence_parallel
        self.weight = self._new_weight(out, into, device, params_dtype, init_method)
        self.bias = self._new_bias(out, device, params_dtype) if bias else None

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None, **_: Any) -> Any:
        x = normalize(x, self.layer_norm_weight, self.layer_norm_bias, self.eps, self.normalization, self.zero_centered_gamma)
        return self._project(x, self.weight, self.bias)


class GroupedLinear(_TensorParallel):
    """One weight per local expert; rows of x come sorted by expert, `m_splits` of them each."""

    def __init__(self, num_gemms: int, in_features: int, out_features: int, sequence_parallel: bool = False,
                 fuse_wgrad_accumulation: bool = False, tp_group: Any = None, tp_size: int = 1, get_rng_state_tracker: Any = None,
                 rng_tracker_name: str | None = None, init_method: Any = None, bias: bool = True, return_bias: bool = False,
                 params_dtype: Any = None, parallel_mode: str | None = None, device: Any = "cpu", **unsupported: Any) -> None:  # fmt: skip
        super().__init__()
        out, into = self._set_up(in_features, out_features, tp_group=tp_group, tp_size=tp_size, parallel_mode=parallel_mode,
                                 sequence_parallel=sequence_parallel, bias=bias, return_bias=return_bias,
                                 fuse_wgrad_accumulation=fuse_wgrad_accumulation, unsupported=unsupported, num_gemms=num_gemms)  # fmt: skip
        for index in range(num_gemms):
            self.register_parameter(f"weight{index}", self._new_weight(out, into, device, params_dtype, init_method))
            if bias:
                self.register_parameter(f"bias{index}", self._new_bias(out, device, params_dtype))

    def init_fp8_metadata(self, num_gemms: int = 1) -> None: ...

    def forward(self, x: torch.Tensor, m_splits: Any, is_first_microbatch: bool | None = None) -> Any:
        sizes = m_splits.tolist() if torch.is_tensor(m_splits) else [int(size) for size in m_splits]
        biases = [getattr(self, f"bias{i}") for i in range(self.num_gemms)] if self.use_bias else None
        weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
        chosen = self._quantizers()
        if chosen is None:
            y = _GroupedProduct.apply(x, sizes, *weights)
        else:
            parts = torch.split(self._watched(x), sizes)
            y = torch.cat([quantized_linear(*each) for each in zip(parts, weights, chosen, strict=True)])
        if biases is not None and not self.return_bias:
            y = y + torch.cat([bias.expand(size, -1) for bias, size in zip(biases, sizes, strict=True)])
        return (y, biases) if self.return_bias else y


class _GroupedProduct(torch.autograd.Function):
    """x W^T of each expert's rows with its weight, written where the next layer reads it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sizes: list[int], *weights: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.sizes = sizes
        ctx.save_for_backward(x, *weights)
        y = x.new_empty(x.shape[0], weights[0].shape[0])
        for rows, part, weight in zip(x.split(sizes), y.split(sizes), weights, strict=True):
            torch.mm(rows, weight.t(), out=part)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, *weights = ctx.saved_tensors
        grads, needs = grad.split(ctx.sizes), ctx.needs_input_grad[2:]
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        if grad_x is not None:
            for of_rows, part, weight in zip(grads, grad_x.split(ctx.sizes), weights, strict=True):
                torch.mm(of_rows, weight, out=part)
        of_weights = [g.t() @ rows if need else None for g, rows, need in zip(grads, x.split(ctx.sizes), needs, strict=True)]
        return grad_x, None, *of_weights
