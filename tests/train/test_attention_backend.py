"""The implementation of attention that Transformer Engine has chosen, from what its module keeps."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from engine_cases import settings
from engine_jobs import attention_flags
from engine_ranks import run_ranks

from megatron_patches import reference_te
from moerl.config.schema.layout import Layout
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


@pytest.mark.parametrize(
    ("megatron", "flags"),
    [
        ({"attention_backend": "flash"}, ("1", "0", "0")),
        ({"attention_backend": "fused"}, ("0", "1", "0")),
        ({"attention_backend": "unfused"}, ("0", "0", "1")),
        ({"attention_backend": "auto"}, ("1", "1", "1")),
        ({}, ("1", "1", "1")),
    ],
    ids=str,
)
def test_the_implementation_that_is_asked_for_is_the_one_that_transformer_engine_is_told_of(megatron, flags, checkpoints):
    asked = settings(checkpoints["qwen3"], Layout(ranks=1))
    found = run_ranks(attention_flags, 1, replace(asked, train=replace(asked.train, megatron=megatron)))
    assert tuple(found.values()) == flags
