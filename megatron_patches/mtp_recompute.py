"""Let layers of multi-token prediction be computed again when sequences are packed.

What breaks: with recompute_granularity=full, MultiTokenPredictionLayer hands all its arguments to the checkpoint, which can keep
tensors only: "save_for_backward can only save variables, but argument 10 is of type PackedSeqParams". Versions: 0.16.1 (read; 0.19.2 hands
over tensors only); upstream: transformer/multi_token_prediction.py, _checkpointed_forward. Can go: with 0.16.1.
"""

import inspect
from typing import Any

import torch

from megatron_patches.errors import require_source

NAME = "mtp_recompute"
_KNOWN = {"cb0c6d18d8984e52": "megatron-core 0.16.1"}
_MARK = "_moerl_mtp_recompute"


def needed() -> bool:
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

    return "forward_func" in inspect.signature(MultiTokenPredictionLayer._checkpointed_forward).parameters


def active() -> bool:
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

    return bool(getattr(MultiTokenPredictionLayer._checkpointed_forward, _MARK, False))


def apply() -> None:
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

    upstream = MultiTokenPredictionLayer._checkpointed_forward
    require_source(upstream, _KNOWN, NAME)

    def _checkpointed_forward(self, forward_func, **named):  # type: ignore[no-untyped-def]
        tensors = {name: value for name, value in named.items() if torch.is_tensor(value)}
        others = {name: value for name, value in named.items() if name not in tensors}

        def forward(*values: Any) -> Any:
            return forward_func(**dict(zip(tensors, values, strict=True)), **others)

        return upstream(self, forward, *tensors.values())

    setattr(_checkpointed_forward, _MARK, True)
    MultiTokenPredictionLayer._checkpointed_forward = _checkpointed_forward
