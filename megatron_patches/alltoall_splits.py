"""Give the MoE all-to-all its split sizes as lists when tensors already live on the CPU.

What breaks: `maybe_move_tensor_to_cpu(..., as_numpy=True)` converts to numpy only `if tensor.is_cuda`, so on CPU
all_to_all_single receives tensors where it wants lists. Versions: 0.16.1 (read); upstream: megatron/core/transformer/moe/
moe_utils.py. Can go: when upstream converts whatever the device.
"""

import torch

from megatron_patches.errors import require_source

NAME = "alltoall_splits"
_KNOWN = {"8fc5847a887d7319": "megatron-core 0.16.1"}
_MARK = "_moerl_alltoall_splits"


def needed() -> bool:
    return not torch.cuda.is_available()


def active() -> bool:
    from megatron.core.transformer.moe import token_dispatcher

    return bool(getattr(token_dispatcher.maybe_move_tensor_to_cpu, _MARK, False))


def apply() -> None:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    require_source(moe_utils.maybe_move_tensor_to_cpu, _KNOWN, NAME)

    def maybe_move_tensor_to_cpu(tensor, as_numpy=False, record_stream=False):  # type: ignore[no-untyped-def]
        return tensor.numpy() if torch.is_tensor(tensor) and as_numpy else tensor

    setattr(maybe_move_tensor_to_cpu, _MARK, True)
    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu
