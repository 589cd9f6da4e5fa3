"""The reference of flash-linear-attention computes what transformers computes token by token, for each sequence of a packed row."""

import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn, l2norm, torch_recurrent_gated_delta_rule

import megatron_patches

ENDS = [0, 1, 64, 130]
HEADS, KEY, VALUE = 3, 8, 5


@pytest.fixture(scope="module")
def fla():
    sys.path.insert(0, str(Path(megatron_patches.__file__).parent / "reference"))
    try:
        import fla.modules.convolution
        import fla.modules.l2norm
        import fla.ops.gated_delta_rule
    finally:
        sys.path.pop(0)
    return fla


def random_tensors(*widths):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, ENDS[-1], *width, generator=generator, dtype=torch.float64) for width in widths]


def per_sequence(compute, *tensors):
    return torch.cat([compute(*(tensor[:, start:end] for tensor in tensors)) for start, end in pairwise(ENDS)], dim=1)


def test_the_delta_rule_and_its_gradients(fla):
    q, k, v, g, beta = random_tensors((HEADS, KEY), (HEADS, KEY), (HEADS, VALUE), (HEADS,), (HEADS,))
    inputs = [l2norm(q), l2norm(k), v, -torch.nn.functional.softplus(g), beta.sigmoid()]
    mine, theirs = ([each.clone().requires_grad_() for each in inputs] for _ in range(2))
    q, k, v, g, beta = mine
    out, _ = fla.ops.gated_delta_rule.chunk_gated_delta_rule(q, k, v, g=g, beta=beta, cu_seqlens=torch.tensor(ENDS))
    # transformers computes in float32.
    expected = per_sequence(lambda q, k, v, g, beta: torch_recurrent_gated_delta_rule(q, k, v, g=g, beta=beta)[0], *theirs)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=0)
    weights = random_tensors((HEADS, VALUE))[0]
    for each in (out, expected):
        (each * weights).sum().backward()
    for found, wanted in zip(mine, theirs, strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, atol=1e-5, rtol=1e-4)


def test_the_convolution_and_the_norm(fla):
    (x,) = random_tensors((6,))
    weight = random_tensors((6,))[0][0, :4].T.contiguous()
    found, _ = fla.modules.convolution.causal_conv1d(x, weight, activation="silu", cu_seqlens=torch.tensor(ENDS))
    expected = per_sequence(lambda x: causal_conv1d_fn(x.transpose(1, 2), weight, activation="silu").transpose(1, 2), x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(fla.modules.l2norm.l2norm(x), l2norm(x))
