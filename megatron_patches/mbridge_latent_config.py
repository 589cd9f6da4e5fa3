"""Let mbridge describe latent attention to a Megatron that has renamed a field.

What breaks: DeepseekV3Bridge passes max_position_embeddings, which is original_max_position_embeddings from 0.13 on: "TypeError:
MLATransformerConfig.__init__() got an unexpected keyword argument 'max_position_embeddings'". Versions: mbridge 0.15.1 with megatron-core
0.16.1 (read); upstream: mbridge/core/llm_bridge.py, _build_base_config. Can go: with an mbridge that passes the new name.
Needed only in processes that use mbridge: activate once more after importing it.
"""

import sys

from megatron_patches.errors import require_source

NAME = "mbridge_latent_config"
_KNOWN: dict[str, str] = {"906440877274de79": "mbridge 0.15.1"}
_MARK = "_moerl_mbridge_latent_config"
_OLD, _NEW = "max_position_embeddings", "original_max_position_embeddings"


def needed() -> bool:
    if "mbridge" not in sys.modules:
        return False
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    return _OLD not in MLATransformerConfig.__dataclass_fields__


def active() -> bool:
    if "mbridge" not in sys.modules:
        return False
    from mbridge.core import LLMBridge

    return bool(getattr(LLMBridge._build_base_config, _MARK, False))


def apply() -> None:
    from mbridge.core import LLMBridge

    upstream = LLMBridge._build_base_config
    require_source(upstream, _KNOWN, NAME)

    def _build_base_config(self, text_config_key=None, **kwargs):  # type: ignore[no-untyped-def]
        if _OLD in kwargs:
            kwargs[_NEW] = kwargs.pop(_OLD)
        return upstream(self, text_config_key, **kwargs)

    setattr(_build_base_config, _MARK, True)
    LLMBridge._build_base_config = _build_base_config
