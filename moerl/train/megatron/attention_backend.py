"""The implementation of attention that Transformer Engine has chosen: it does so at a forward pass, by sizes, dtypes and what is installed,
and tells nobody."""

import sys

CHOICE = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
"""Module of Transformer Engine whose `_attention_backends` says what the last forward pass ran."""


def attention_backend() -> str:
    """Name of it, as text."""
    from megatron_patches import reference_te  # not with this module: it imports torch, which the driver has not

    if reference_te.active():
        return "the PyTorch reference of Transformer Engine"
    chosen = getattr(sys.modules.get(CHOICE), "_attention_backends", {})
    if chosen.get("use_flash_attention"):
        return f"flash-attn {chosen.get('flash_attention_backend')}"
    if chosen.get("use_fused_attention"):
        return f"cuDNN through Transformer Engine ({chosen.get('fused_attention_backend')})"
    return "PyTorch, unfused: slow" if chosen.get("use_unfused_attention") else "not known"
