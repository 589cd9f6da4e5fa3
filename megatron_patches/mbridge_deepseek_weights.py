"""Let mbridge read DeepSeek checkpoints that are not FP8, and train them in other types than bfloat16.

What breaks: DeepseekV3Bridge reads every checkpoint through a Triton kernel onto a CUDA device, and calls NotImplemented for others:
"TypeError: 'NotImplementedType' object is not callable". Plain tensors need neither; moerl refuses FP8 before. Versions: mbridge 0.15.1
(read); upstream: mbridge/models/deepseek_v3.py, _get_safetensor_io. Can go: with an mbridge that chooses by the checkpoint.
Needed only in processes that use mbridge: activate once more after importing it.
"""

import sys

from megatron_patches.errors import require_source

NAME = "mbridge_deepseek_weights"
_KNOWN: dict[str, str] = {"2b1bf3a403b49d55": "mbridge 0.15.1"}
_MARK = "_moerl_mbridge_deepseek_weights"


def needed() -> bool:
    return "mbridge" in sys.modules


def active() -> bool:
    if "mbridge" not in sys.modules:
        return False
    from mbridge.models import DeepseekV3Bridge

    return bool(getattr(DeepseekV3Bridge._get_safetensor_io, _MARK, False))


def apply() -> None:
    from mbridge.core.bridge import Bridge
    from mbridge.models import DeepseekV3Bridge

    require_source(DeepseekV3Bridge._get_safetensor_io, _KNOWN, NAME)

    def _get_safetensor_io(self, weights_path):  # type: ignore[no-untyped-def]
        return Bridge._get_safetensor_io(self, weights_path)

    setattr(_get_safetensor_io, _MARK, True)
    DeepseekV3Bridge._get_safetensor_io = _get_safetensor_io
