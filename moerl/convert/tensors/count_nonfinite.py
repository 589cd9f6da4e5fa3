"""Count values of a tensor that are not finite while it streams by; warn or refuse with all of them."""

import logging
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from moerl.convert.tensors.writing import Finished
from moerl.types.errors import ConvertError, problem

logger = logging.getLogger(__name__)

NonFinite = Literal["warn", "error", "ignore"]
NONFINITE = "nonfinite"
"""In a file's notes: tensor -> count."""

_INTEGERS = {torch.bfloat16: (torch.int16, 0x7F80), torch.float16: (torch.int16, 0x7C00), torch.float32: (torch.int32, 0x7F800000)}
"""An integer of the same size, and its bits of the exponent: all set for infinities and NaN."""


def count_nonfinite(piece: Tensor) -> int:
    """NaN and infinities; 0 for integers."""
    if piece.dtype in _INTEGERS:
        as_integer, exponent = _INTEGERS[piece.dtype]
        exponents = piece.view(as_integer).bitwise_and(exponent)
        # The maximum is ten times as fast as a count, which hardly any tensor needs.
        if piece.numel() == 0 or int(exponents.max()) != exponent:
            return 0
        return int(exponents.eq(exponent).sum())
    if piece.dtype == torch.float8_e4m3fn:  # has no infinities, and one NaN of either sign
        return int(piece.view(torch.uint8).bitwise_and(0x7F).eq(0x7F).sum())
    return int((~piece.double().isfinite()).sum()) if piece.is_floating_point() else 0


def report(finished: Sequence[Finished], nonfinite: NonFinite) -> None:
    """Report of all files, including those a run before this one has written. Raises ConvertError with `error`."""
    counts = {name: count for each in finished for name, count in each.notes.get(NONFINITE, {}).items()}
    if nonfinite == "error" and counts:
        reason = "a model with such weights answers nothing but NaN"
        fix = "fetch or train the checkpoint again; --dtype bfloat16 if float16, which ends at 65504, alone has no room for them; "
        fix += "or --nonfinite warn to convert it as it is"
        raise ConvertError(
            [problem("SRC", name, f"holds {count} values that are not finite", reason, fix) for name, count in counts.items()]
        )
    for name, count in counts.items():
        logger.warning("%s holds %d values that are not finite", name, count)
