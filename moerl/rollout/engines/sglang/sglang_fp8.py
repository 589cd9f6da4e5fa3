"""Weights in FP8 blocks in SGLang's model, where its kernels want them otherwise than a push brings them.

DeepGEMM on Blackwell takes scales that are powers of two, four of them in an int32, for every row of a weight. SGLang repacks what it has
loaded (requant_block_scale_ue8m0_for_deepgemm) into new memory, which no captured graph reads, and has no way back before the next load.
Here a push finds scales as checkpoints have them, and what is repacked goes where it was.
"""

from collections.abc import Iterable

import torch

from moerl.models.fp8_names import SCALE_SUFFIX, scale_shape

_IS_PACKED = "format_ue8m0"
"""SGLang's mark of scales that it has repacked."""
_KERNELS = "moerl_kernels_scales"
"""Buffers of scales of which a push is under way: what kernels read."""
_OF_CACHE = (".k_scale", ".v_scale")


def prepare() -> None:
    """Patches SGLang in this process, once it is there."""
    _repack_in_place()
    _leave_scales_of_caches()


def comes_by_push(name: str) -> bool:
    """Whether checkpoints have SGLang's parameter with that name."""
    return not name.endswith(_OF_CACHE)


def _leave_scales_of_caches() -> None:
    """SGLang's random weights of a start without a checkpoint (load_format=dummy) are random scales of keys and values too, which nobody
    sends: as they were they stand for 1 (BaseKVCacheMethod)."""
    from sglang.srt.model_loader import loader

    fill = loader.initialize_dummy_weights

    def initialize(model: torch.nn.Module) -> None:
        fill(model)
        for name, parameter in model.named_parameters():
            if not comes_by_push(name):
                parameter.data.fill_(-1)

    loader.initialize_dummy_weights = initialize


def _repack_in_place() -> None:
    """Values are rounded anew by SGLang, which changes none whose scale is a power of two already."""
    from sglang.srt.layers.quantization import fp8_utils

    first_time = fp8_utils.requant_weight_ue8m0_inplace

    def requantize(weight: torch.nn.Parameter, scales: torch.nn.Parameter, block: list[int]) -> None:
        if (read := getattr(scales, _KERNELS, None)) is None:
            first_time(weight, scales, block)
            return
        # Expert by expert: a server's memory is full of keys and values when a push comes.
        stack = (weight.data, scales.data, read)
        for values, found, kernels in [stack] if weight.dim() == 2 else zip(*stack, strict=True):
            new_values, packed = fp8_utils.requant_weight_ue8m0(values, found, block)
            values.copy_(new_values)
            kernels.copy_(packed)
        scales.data = read
        delattr(scales, _KERNELS)

    fp8_utils.requant_weight_ue8m0_inplace = requantize


def unpack(parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
    """Before a push, also after one that failed: memory for scales as they come. `parameters`: of SGLang's model, by name."""
    by_name = dict(parameters)
    for name, scales in by_name.items():
        if not name.endswith(SCALE_SUFFIX) or not getattr(scales, _IS_PACKED, False):
            continue
        *stack, rows, columns = by_name[name.removesuffix(SCALE_SUFFIX)].shape
        setattr(scales, _KERNELS, scales.data)
        scales.data = torch.ones(*stack, *scale_shape((rows, columns)), dtype=torch.float32, device=scales.device)
        setattr(scales, _IS_PACKED, False)
