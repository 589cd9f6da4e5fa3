"""A critic on Megatron: values and updates as transformers and autograd make them, under every layout, split and order."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from algorithm_jobs import ragged_batch
from critic_jobs import head_weights, train_critic
from engine_cases import LAYOUTS, settings
from engine_ranks import run_ranks
from hf_trainer import WiderFloats, load_model

from moerl.config.schema.layout import Layout

ORDER, CLIP = list(range(13)), 0.1


def exact(directory, layout, **options):
    chosen = settings(directory, layout, dtype="float64", **options)
    return replace(chosen, is_critic=True, train=replace(chosen.train, optimizer=replace(chosen.train.optimizer, clip_grad=None)))


def critic_batch(*, outside=0.0):
    """Values are differences from the critic's own."""
    batch, rng = ragged_batch(outside=outside), np.random.default_rng(5)
    columns = {name: np.where(batch.response_mask_T, rng.normal(size=len(batch.token_ids_T)) * scale, outside) for name, scale in SCALES}
    return replace(batch, rl_weight_T=None, ce_weight_T=None, kl_weight_T=None, **columns)


SCALES = (("values_T", 0.2), ("returns_T", 2.0))


@pytest.fixture(scope="module")
def one_process(checkpoints):
    return run_ranks(train_critic, 1, exact(checkpoints["qwen3_moe"], Layout()), critic_batch(), ORDER, CLIP)


def by_transformers(directory, batch, clip):
    """Values [T] before and after two updates by AdamW, the losses, and the shares that the clip holds: one sequence at a time."""
    model = load_model(directory, torch.float64).model
    head = head_weights(model.config.hidden_size).clone().requires_grad_()
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    adam = settings(directory, Layout()).train.optimizer
    groups = [{"params": [*decayed, head], "weight_decay": adam.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=adam.betas, eps=adam.eps)
    mask_T, returns_T = torch.from_numpy(batch.response_mask_T), torch.from_numpy(batch.returns_T)

    def values():
        pieces = []
        for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
            with WiderFloats():
                hidden = model(torch.from_numpy(batch.token_ids_T[start:end])[None]).last_hidden_state[0]
            pieces += [torch.zeros(1, dtype=torch.float64), (hidden @ head.T)[:-1, 0]]
        return torch.cat(pieces)

    before_T = values().detach()
    old_T, losses, held = before_T + torch.from_numpy(batch.values_T), [], []
    for _ in range(2):
        now_T = values()
        error = (now_T - returns_T)[mask_T] ** 2
        if clip is not None:
            near = (torch.minimum(torch.maximum(now_T, old_T - clip), old_T + clip) - returns_T)[mask_T] ** 2
            held.append((near > error).double().mean().item())
            error = torch.maximum(error, near)
        loss = 0.5 * error.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return before_T.numpy(), values().detach().numpy(), losses, held


@pytest.mark.parametrize("clip", [CLIP, None])
def test_a_critic_learns_as_plain_autograd_does(clip, checkpoints, one_process):
    found = one_process if clip else run_ranks(train_critic, 1, exact(checkpoints["qwen3_moe"], Layout()), critic_batch(), ORDER, clip)
    before_T, after_T, losses, held = by_transformers(checkpoints["qwen3_moe"], critic_batch(), clip)
    # Rotary angles are float32 in both.
    np.testing.assert_allclose(found.before_T, before_T, rtol=0, atol=1e-6)
    assert [stats.loss for stats in found.steps] == pytest.approx(losses, rel=1e-6)
    assert [stats.objective["clipped_values"] for stats in found.steps] == pytest.approx(held or [0, 0])
    assert clip is None or 0 < held[0] < 1
    np.testing.assert_allclose(found.after_T, after_T, rtol=0, atol=1e-5)
    assert not found.fresh_T.any()


def assert_alike(found, expected):
    np.testing.assert_allclose(found.before_T, expected.before_T, rtol=0, atol=1e-10)
    np.testing.assert_allclose(found.after_T, expected.after_T, rtol=0, atol=1e-9)
    for stats, wanted in zip(found.steps, expected.steps, strict=True):
        assert (stats.loss, stats.num_tokens) == pytest.approx((wanted.loss, wanted.num_tokens), rel=1e-10)
        assert stats.objective == pytest.approx(wanted.objective, rel=1e-10, abs=1e-12)
        assert stats.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-6)


@pytest.mark.parametrize("layout", ["dp2", "cp2", "tp2-ep2", "pp2", pytest.param("pp2-vpp2", marks=pytest.mark.matrix)])
def test_a_critic_learns_alike_under_a_layout(layout, checkpoints, one_process):
    chosen = exact(checkpoints["qwen3_moe"], LAYOUTS[layout])
    assert_alike(run_ranks(train_critic, LAYOUTS[layout].ranks, chosen, critic_batch(), ORDER, CLIP), one_process)


def test_micro_batches_order_and_what_is_outside_the_mask_do_not_matter(checkpoints, one_process):
    chosen = exact(checkpoints["qwen3_moe"], Layout(), micro_batch_tokens=32)
    assert_alike(run_ranks(train_critic, 1, chosen, critic_batch(outside=float("nan")), ORDER[::-1], CLIP), one_process)
