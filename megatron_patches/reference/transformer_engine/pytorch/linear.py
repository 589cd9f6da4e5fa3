"""Linear, LayerNormLinear and GroupedLinear with Megatron's tensor and sequence parallelism.

Weights are [out, in]. column: rows of the weight are split over tp; row: its columns. Communication goes through Megatron's own
autograd functions, so forward and backward match its native layers. Inside fp8_autocast the operands of every product are rounded
to FP8 (quantize.py).
"""

from typing import Any

import torch
from torch import nn

from transformer_engine.pytorch.fp8 import FP8GlobalStateManager
from transformer_engine.pytorch.norm import normalize
from transformer_engine.pytorch.quantize import product


class _TensorParallel(nn.Module):
    """What the three layers share: sizes of the local shard, communication before and after, the empty extra state."""

    def _set_up(self, in_features: int, out_features: int, *, tp_group: Any, tp_size: int, parallel_mode: str | None,
                sequence_parallel: bool, bias: bool, return_bias: bool, fuse_wgrad_accumulation: bool,
                delay_wgrad_compute: bool) -> tuple[int, int]:  # fmt: skip
        if fuse_wgrad_accumulation:
            raise RuntimeError("gradient_accumulation_fusion needs Transformer Engine on a GPU")
        if delay_wgrad_compute:
            raise RuntimeError("delay_wgrad_compute needs Transformer Engine on a GPU")
        self.in_features, self.out_features = in_features, out_features
        self.tp_group, self.tp_size, self.parallel_mode = tp_group, tp_size, parallel_mode
        self.sequence_parallel = sequence_parallel and tp_size > 1
        self.use_bias, self.return_bias = bias, return_bias
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False, "recipe": None}
        self.fp8 = self.fp8_calibration = False
        return out_features // (tp_size if parallel_mode == "column" else 1), in_features // (tp_size if parallel_mode == "row" else 1)

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None: ...

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

    def _project(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        """x W^T (+ bias after the reduction, so that a row-parallel bias is added once)."""
        y = self._after(product(self._before(x), weight, FP8GlobalStateManager.recipe))
        if self.return_bias:
            return y, bias
        return y if bias is None else y + bias


class Linear(_TensorParallel):
    def __init__(self, in_features: int, out_features: int, sequence_parallel: bool = False, fuse_wgrad_accumulation: bool = False,
                 tp_group: Any = None, tp_size: int = 1, get_rng_state_tracker: Any = None, init_method: Any = None, bias: bool = True,
                 return_bias: bool = False, parallel_mode: str | None = None, params_dtype: Any = None, device: Any = "cpu",
                 delay_wgrad_compute: bool = False, **_: Any) -> None:  # fmt: skip
        super().__init__()
        out, into = self._set_up(in_features, out_features, tp_group=tp_group, tp_size=tp_size, parallel_mode=parallel_mode,
                                 sequence_parallel=sequence_parallel, bias=bias, return_bias=return_bias,
                                 fuse_wgrad_accumulation=fuse_wgrad_accumulation,
                                 delay_wgrad_compute=delay_wgrad_compute)  # fmt: skip
        self.weight = self._new_weight(out, into, device, params_dtype, init_method)
        self.bias = self._new_bias(out, device, params_dtype) if bias else None

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None, **_: Any) -> Any:
        return self._project(x, self.weight, self.bias)


class LayerNormLinear(_TensorParallel):
    def __init__(self, in_features: int, out_features: int, eps: float = 1e-5, sequence_parallel: bool = False,
                 fuse_wgrad_accumulation: bool = False, tp_group: Any = None, tp_size: int = 1, get_rng_state_tracker: Any = None,
                 init_method: Any = None, bias: bool = True, return_bias: bool = False, parallel_mode: str | None = None,
                 return_layernorm_output: bool = False, zero_centered_gamma: bool = False, normalization: str = "LayerNorm",
                 params_dtype: Any = None, device: Any = "cpu",
                 delay_wgrad_compute: bool = False, **_: Any) -> None:  # fmt: skip
        super().__init__()
        if return_layernorm_output:
            raise RuntimeError("return_layernorm_output needs Transformer Engine on a GPU")
        out, into = self._set_up(in_features, out_features, tp_group=tp_group, tp_size=tp_size, parallel_mode=parallel_mode,
                                 sequence_parallel=sequence_parallel, bias=bias, return_bias=return_bias,
                                 fuse_wgrad_accumulation=fuse_wgrad_accumulation,
                                 delay_wgrad_compute=delay_wgrad_compute)  # fmt: skip
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
                 params_dtype: Any = None, parallel_mode: str | None = None, device: Any = "cpu",
                 delay_wgrad_compute: bool = False, **_: Any) -> None:  # fmt: skip
        super().__init__()
        out, into = self._set_up(in_features, out_features, tp_group=tp_group, tp_size=tp_size, parallel_mode=parallel_mode,
                                 sequence_parallel=sequence_parallel, bias=bias, return_bias=return_bias,
                                 fuse_wgrad_accumulation=fuse_wgrad_accumulation,
                                 delay_wgrad_compute=delay_wgrad_compute)  # fmt: skip
        self.num_gemms = num_gemms
        for index in range(num_gemms):
            self.register_parameter(f"weight{index}", self._new_weight(out, into, device, params_dtype, init_method))
            if bias:
                self.register_parameter(f"bias{index}", self._new_bias(out, device, params_dtype))

    def init_fp8_metadata(self, num_gemms: int = 1) -> None: ...

    def forward(self, x: torch.Tensor, m_splits: Any, is_first_microbatch: bool | None = None) -> Any:
        sizes = m_splits.tolist() if torch.is_tensor(m_splits) else [int(size) for size in m_splits]
        biases = [getattr(self, f"bias{i}") for i in range(self.num_gemms)] if self.use_bias else None
        pieces = [self._expert(i, part, biases) for i, part in enumerate(torch.split(x, sizes))]
        y = torch.cat(pieces)
        return (y, biases) if self.return_bias else y

    def _expert(self, index: int, x: torch.Tensor, biases: list[torch.Tensor] | None) -> torch.Tensor:
        y = product(x, getattr(self, f"weight{index}"), FP8GlobalStateManager.recipe)
        return y if biases is None or self.return_bias else y + biases[index]
