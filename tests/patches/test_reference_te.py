"""The plain reference of Transformer Engine: attention, rotary positions, experts, norms and Adam against PyTorch's own."""

import importlib.util
import math
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_ranks import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from patch_jobs import attend_over_ranks, grouped_products
from torch.nn import functional

import megatron_patches

CLASSES = Path(megatron_patches.__file__).parent / "reference" / "transformer_engine" / "pytorch"


def load(name):
    """One file of the reference, without making it importable as transformer_engine."""
    spec = importlib.util.spec_from_file_location(f"reference_{Path(name).stem}", CLASSES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


attention, rope, norm, optimizers = load("attention/__init__"), load("attention/rope"), load("norm"), load("optimizers")


def random_tensors(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]


def naive(q, k, v, scale, causal, window=None, sinks=None):
    """[s, heads, d] each, head by head. `window`: positions that a query sees before its own. `sinks`: a logit per head, no value."""
    per_group = q.shape[1] // k.shape[1]
    heads = []
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // per_group].T * scale
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        if window is not None:
            scores = scores.masked_fill(torch.ones_like(scores).tril(-window - 1).bool(), -torch.inf)
        weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + (0 if sinks is None else sinks[head].exp()))
        heads.append(weights @ v[:, head // per_group])
    return torch.cat(heads, dim=-1)


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    groups=st.integers(1, 3),
    queries=st.integers(1, 3),
    scale=st.sampled_from([None, 0.3]),
    causal=st.booleans(),
)
def test_packed_attention_equals_each_sequence_alone_forward_and_backward(lengths, groups, queries, scale, causal):
    total, width = sum(lengths), 4
    q, k, v = random_tensors((total, groups * queries, width), (total, groups, width), (total, groups, width))
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    layer = attention.DotProductAttention(groups * queries, width, groups, softmax_scale=scale)
    kind = "padding_causal" if causal else "padding"
    out = layer(q, k, v, None, "thd", kind, cu_seqlens_q=torch.tensor(bounds, dtype=torch.int32))
    used = 1 / math.sqrt(width) if scale is None else scale
    expected = torch.cat([naive(q[a:b], k[a:b], v[a:b], used, causal) for a, b in pairwise(bounds)])
    torch.testing.assert_close(out, expected)
    weights = torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape)
    for got, wanted in zip(
        torch.autograd.grad((out * weights).sum(), (q, k, v)), torch.autograd.grad((expected * weights).sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(got, wanted)


@given(
    lengths=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    groups=st.integers(1, 3),
    window=st.one_of(st.none(), st.integers(0, 9)),
    has_sinks=st.booleans(),
)
def test_windows_and_sinks_equal_their_definition_forward_and_backward(lengths, groups, window, has_sinks):
    total, heads = sum(lengths), 2 * groups
    q, k, v, sinks = random_tensors((total, heads, 4), (total, groups, 4), (total, groups, 4), (heads,))
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    size = None if window is None else (window, 0)
    layer = attention.DotProductAttention(heads, 4, groups, window_size=size, softmax_type="learnable" if has_sinks else "vanilla")
    used = [q, k, v]
    if has_sinks:
        layer.softmax_offset = torch.nn.Parameter(sinks.detach().clone())
        used.append(sinks)
    out = layer(q, k, v, None, "thd", "padding_causal", cu_seqlens_q=torch.tensor(bounds, dtype=torch.int32))
    chosen = sinks if has_sinks else None
    expected = torch.cat([naive(q[a:b], k[a:b], v[a:b], 0.5, True, window, chosen) for a, b in pairwise(bounds)])
    torch.testing.assert_close(out, expected)
    weights = torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape)
    leaves = [q, k, v, *([layer.softmax_offset] if has_sinks else [])]
    for got, wanted in zip(
        torch.autograd.grad((out * weights).sum(), leaves), torch.autograd.grad((expected * weights).sum(), used), strict=True
    ):
        torch.testing.assert_close(got, wanted)
    alone = layer(*(t[: lengths[0], None] for t in (q, k, v)), None, "sbhd", "causal")
    torch.testing.assert_close(alone[:, 0], expected[: lengths[0]])


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_attention_over_a_batch_of_equal_lengths_is_causal(groups):
    q, k, v = random_tensors((5, 2, 4, 8), (5, 2, groups, 8), (5, 2, groups, 8))
    out = attention.DotProductAttention(4, 8, groups)(q, k, v, None, "sbhd", "causal")
    for column in range(2):
        torch.testing.assert_close(out[:, column], naive(q[:, column], k[:, column], v[:, column], 1 / math.sqrt(8), True))


def test_a_padding_mask_hides_keys():
    """Megatron's masks are True where nothing may be seen."""
    q, k, v = random_tensors((4, 1, 2, 8), (4, 1, 2, 8), (4, 1, 2, 8))
    hidden = torch.zeros(1, 1, 4, 4, dtype=torch.bool)
    hidden[..., 3] = True
    out = attention.DotProductAttention(2, 8, 2)(q, k, v, hidden, "sbhd", "padding")
    torch.testing.assert_close(out[:3, 0], naive(q[:, 0], k[:3, 0], v[:3, 0], 1 / math.sqrt(8), False)[:3])


@pytest.mark.parametrize(
    ("heads", "groups", "channels", "value_channels"), [(4, 4, 8, 8), (4, 2, 8, 8), (3, 3, 6, 4)], ids=["mha", "gqa", "mla"]
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_attention_over_context_parallel_ranks_equals_attention_of_the_whole(ranks, heads, groups, channels, value_channels):
    bounds = [0, 2 * ranks, 8 * ranks, 10 * ranks, 22 * ranks]
    differences = run_ranks(attend_over_ranks, ranks, bounds, heads, groups, channels, value_channels)
    assert max(differences.values()) < 1e-12, differences


@pytest.mark.parametrize("option", [{"softmax_type": "off-by-one"}, {"window_size": (4, 4)}])
def test_attention_that_the_reference_lacks_is_an_error(option):
    with pytest.raises(RuntimeError, match="not in the reference"):
        attention.DotProductAttention(2, 8, **option)


@pytest.mark.parametrize("kind", ["padding", "padding_causal"])
def test_a_window_beside_a_mask_of_its_own_is_an_error(kind):
    q, k, v = random_tensors((4, 1, 2, 8), (4, 1, 2, 8), (4, 1, 2, 8))
    with pytest.raises(RuntimeError, match="not in the reference"):
        attention.DotProductAttention(2, 8, 2, window_size=(1, 0))(q, k, v, torch.zeros(1, 1, 4, 4, dtype=torch.bool), "sbhd", kind)


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_experts_in_one_layer_equal_each_alone_also_one_without_tokens(has_bias):
    differences = run_ranks(grouped_products, 1, [3, 0, 5], has_bias)
    assert len(differences) == 2 + 3 * (1 + has_bias)
    assert max(differences.values()) < 1e-12


@given(
    chunks=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    heads=st.integers(1, 3),
    ranks=st.sampled_from([1, 2, 3]),
    rotated=st.sampled_from([2, 4, 6]),
)
def test_a_rotation_equals_complex_numbers_sequence_by_sequence_forward_and_backward(chunks, heads, ranks, rotated):
    """Halves as real and imaginary parts, of packed sequences cut over context-parallel ranks; the rest of a head stays as it is."""
    bounds = [0, *accumulate(2 * ranks * chunk for chunk in chunks)]
    t, weight = random_tensors((bounds[-1], heads, 6), (bounds[-1], heads, 6))
    angles = torch.arange(max(np.diff(bounds)))[:, None] * 0.7 ** torch.arange(rotated // 2)
    position = torch.cat([torch.arange(end - start) for start, end in pairwise(bounds)])
    halves = torch.complex(t[..., : rotated // 2], t[..., rotated // 2 : rotated])
    turned = halves * torch.polar(torch.ones(()), angles[position])[:, None].to(torch.complex128)
    wanted = torch.cat([turned.real, turned.imag, t[..., rotated:]], dim=-1)
    (of_whole,) = torch.autograd.grad((wanted * weight).sum(), t)
    freqs = torch.cat([angles, angles], dim=-1)[:, None, None]
    for rank in range(ranks):
        mine = attention.zigzag(bounds, rank, ranks)
        part = t[mine].detach().requires_grad_()
        found = rope.apply_rotary_pos_emb(part, freqs, "thd", fused=True, cu_seqlens=torch.tensor(bounds), cp_size=ranks, cp_rank=rank)
        (gradient,) = torch.autograd.grad((found * weight[mine]).sum(), part)
        # Angles are float32.
        torch.testing.assert_close(found, wanted[mine], rtol=0, atol=1e-6)
        torch.testing.assert_close(gradient, of_whole[mine], rtol=0, atol=1e-6)


def test_a_rotation_of_padded_sequences_is_that_of_packed_ones_and_keeps_its_type():
    (t,) = random_tensors((5, 2, 3, 8))
    t = t.detach().to(torch.bfloat16)
    freqs = torch.arange(5.0)[:, None, None, None] * torch.tensor([1.0, 0.1, 1.0, 0.1])
    padded = rope.apply_rotary_pos_emb(t, freqs, "sbhd", fused=True)
    packed = rope.apply_rotary_pos_emb(t.transpose(0, 1).flatten(0, 1), freqs, "thd", fused=True, cu_seqlens=torch.tensor([0, 5, 10]))
    assert padded.dtype == torch.bfloat16
    assert padded.transpose(0, 1).flatten(0, 1).equal(packed)


@pytest.mark.parametrize("option", [{"interleaved": True}, {"start_positions": torch.zeros(1)}, {"tensor_format": "bshd"}])
def test_a_rotation_that_the_reference_lacks_is_an_error(option):
    with pytest.raises(RuntimeError, match="need Transformer Engine on a GPU"):
        rope.apply_rotary_pos_emb(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2), **option)


@pytest.mark.parametrize("zero_centered", [False, True])
def test_gradients_of_an_rms_norm_equal_autograds(zero_centered):
    x, weight, grad = random_tensors((3, 2, 8), (8,), (3, 2, 8))
    arguments = (None, 1e-3, "RMSNorm", zero_centered)
    torch.autograd.gradcheck(lambda *inputs: norm.normalize(*inputs, *arguments), (x, weight))
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [each.detach().to(dtype).requires_grad_() for each in (x, weight)]
        wide, scale = inputs[0].float(), inputs[1].float() + int(zero_centered)
        expected = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-3) * scale).to(dtype)
        got = norm.normalize(*inputs, *arguments)
        torch.testing.assert_close(got, expected)
        for ours, theirs in zip(*(torch.autograd.grad(y, inputs, grad.to(dtype)) for y in (got, expected)), strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("zero_centered", [False, True])
def test_norms_equal_pytorch(zero_centered):
    (x,) = random_tensors((3, 16))
    x = x.detach().float()
    layers = norm.RMSNorm(16, eps=1e-3, zero_centered_gamma=zero_centered), norm.LayerNorm(16, eps=1e-3, zero_centered_gamma=zero_centered)
    for layer in layers:
        with torch.no_grad():
            layer.weight.add_(torch.linspace(-1, 1, 16))
    scale = layers[0].weight + 1 if zero_centered else layers[0].weight
    torch.testing.assert_close(layers[0](x), functional.rms_norm(x, (16,), scale, 1e-3))
    torch.testing.assert_close(layers[1](x), functional.layer_norm(x, (16,), scale, layers[1].bias, 1e-3))
    torch.testing.assert_close(layers[0](x.bfloat16()), functional.rms_norm(x.bfloat16().float(), (16,), scale, 1e-3).bfloat16())


@pytest.mark.parametrize(("decoupled", "weight_decay"), [(True, 0.1), (True, 0.0), (False, 0.1)])
def test_adam_equals_pytorch_over_many_steps(decoupled, weight_decay):
    start = torch.randn(50, generator=torch.Generator().manual_seed(0))
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": weight_decay}
    pytorch_class = torch.optim.AdamW if decoupled else torch.optim.Adam
    fused, reference = optimizers.FusedAdam([ours], adam_w_mode=decoupled, **options), pytorch_class([theirs], **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        gradient = torch.randn(50, generator=generator)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        fused.step()
        reference.step()
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    assert (ours - start).abs().mean() > 1e-2
    assert ours.grad.equal(gradient)


def test_adam_counts_steps_in_the_group_where_distributed_checkpoints_look_for_it():
    with_gradient, without = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    adam = optimizers.FusedAdam([with_gradient, without])
    for _ in range(3):
        with_gradient.grad = torch.ones(2)
        adam.step()
    assert adam.param_groups[0]["step"] == 3
    assert adam.state[with_gradient].keys() == {"exp_avg", "exp_avg_sq"}
    assert without not in adam.state
    assert without.equal(torch.ones(2))


def test_adam_options_that_the_reference_lacks_are_an_error():
    with pytest.raises(RuntimeError, match="bias_correction=False.*capturable.*store_param_remainders"):
        optimizers.FusedAdam([torch.nn.Parameter(torch.ones(1))], capturable=True, store_param_remainders=True, bias_correction=False)
