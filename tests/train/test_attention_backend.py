"""The implementation of attention that Transformer Engine has chosen, from what its module keeps."""

import sys
from types import SimpleNamespace

import pytest

from megatron_patches import reference_te
from moerl.train.megatron.attention_backend import CHOICE, attention_backend


def test_on_cpu_it_is_the_reference(monkeypatch):
    monkeypatch.setattr(reference_te, "active", lambda: True)
    assert attention_backend() == "the PyTorch reference of Transformer Engine"


@pytest.mark.parametrize(
    ("chosen", "name"),
    [
        ({"use_flash_attention": True, "flash_attention_backend": "2.8.3"}, "flash-attn 2.8.3"),
        ({"use_flash_attention": False, "use_fused_attention": True, "fused_attention_backend": 1}, "cuDNN through Transformer Engine (1)"),
        ({"use_flash_attention": False, "use_fused_attention": False, "use_unfused_attention": True}, "PyTorch, unfused: slow"),
        ({"attention_params": None}, "not known"),
    ],
)
def test_with_transformer_engine_it_is_named(chosen, name, monkeypatch):
    """The names are held against its distribution (tests/wheels)."""
    monkeypatch.setattr(reference_te, "active", lambda: False)
    monkeypatch.setitem(sys.modules, CHOICE, SimpleNamespace(_attention_backends=chosen))
    assert attention_backend() == name
