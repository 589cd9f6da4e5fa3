"""Scales of FP8 blocks that an engine's kernels take as they are sent."""

from torch import Tensor

from moerl.models.fp8_blocks import round_up_to_power_of_two
from moerl.models.fp8_names import SCALE_SUFFIX
from moerl.types.errors import WeightError


def check_powers_of_two(name: str, tensor: Tensor, engine: str) -> None:
    """WeightError for scales of a push that DeepGEMM's kernels could only take rounded up, and the values rounded once more with them."""
    if name.endswith(SCALE_SUFFIX) and not tensor.equal(round_up_to_power_of_two(tensor)):
        raise WeightError(
            f"tensor {name!r}: {engine}'s kernels on this GPU take scales that are powers of two (UE8M0), and it would round these, and "
            "the values with them; name the GPU of the servers as placement.gpu, and they are made so"
        )
