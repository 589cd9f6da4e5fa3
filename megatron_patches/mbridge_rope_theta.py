"""Let mbridge read the base of rotary embeddings where transformers 5 keeps it.

What breaks: every bridge of mbridge that builds latent attention reads config.rope_theta, and LLMBridge does for its models;
transformers 5 has it in config.rope_parameters only: "AttributeError: object has no attribute 'rope_theta'". Versions: mbridge 0.15.1 with
transformers 5.19 (read); upstream: mbridge/core/bridge.py, Bridge.__init__. Can go: with an mbridge that reads rope_parameters.
Needed only in processes that use mbridge: activate once more after importing it.
"""

import sys
from importlib.metadata import version

from packaging.version import Version

from megatron_patches.errors import require_source

NAME = "mbridge_rope_theta"
_KNOWN: dict[str, str] = {"c66e3225257c51eb": "mbridge 0.15.1"}
_MARK = "_moerl_mbridge_rope_theta"


def needed() -> bool:
    return "mbridge" in sys.modules and Version(version("transformers")) >= Version("5")


def active() -> bool:
    if "mbridge" not in sys.modules:
        return False
    from mbridge.core.bridge import Bridge

    return bool(getattr(Bridge.__init__, _MARK, False))


def apply() -> None:
    from mbridge.core.bridge import Bridge

    upstream = Bridge.__init__
    require_source(upstream, _KNOWN, NAME)

    def __init__(self, hf_config, *args, **kwargs):  # type: ignore[no-untyped-def]
        if not hasattr(hf_config, "rope_theta"):
            hf_config.rope_theta = hf_config.rope_parameters["rope_theta"]
        upstream(self, hf_config, *args, **kwargs)

    setattr(__init__, _MARK, True)
    Bridge.__init__ = __init__
