"""Let Megatron-Bridge scatter the columns of a matrix over gloo.

What breaks: row-parallel weights are split with torch.chunk along dim 1, whose parts are not contiguous; gloo scatters their storage from
the first element on, so that ranks get wrong values without an error. NCCL copies such parts itself. Versions: megatron-bridge 0.3.1 with
torch 2.13 (seen); upstream: megatron/bridge/models/conversion/param_mapping.py, scatter_to_tp_ranks. Can go: with parts made contiguous.
Needed only in processes without CUDA that use Megatron-Bridge: activate once more after importing it.
"""

import sys

import torch

from megatron_patches.errors import require_source

NAME = "megatron_bridge_scatter"
_MODULE = "megatron.bridge.models.conversion.param_mapping"
_KNOWN: dict[str, str] = {"3d4d0ac20bd3be95": "megatron-bridge 0.3.1"}
_MARK = "_moerl_megatron_bridge_scatter"


def needed() -> bool:
    return _MODULE in sys.modules and not torch.cuda.is_available()


def active() -> bool:
    if _MODULE not in sys.modules:
        return False
    from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping

    return bool(getattr(MegatronParamMapping.scatter_to_tp_ranks, _MARK, False))


def apply() -> None:
    from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping

    upstream = MegatronParamMapping.scatter_to_tp_ranks
    require_source(upstream, _KNOWN, NAME)

    def scatter_to_tp_ranks(self, splits, *args, **kwargs):  # type: ignore[no-untyped-def]
        contiguous = None if splits is None else [split.contiguous() for split in splits]
        return upstream(self, contiguous, *args, **kwargs)

    setattr(scatter_to_tp_ranks, _MARK, True)
    MegatronParamMapping.scatter_to_tp_ranks = scatter_to_tp_ranks
