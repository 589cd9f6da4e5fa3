"""Load-balancing losses of routers are of tokens alone: with their statement in plain PyTorch, whatever padding a layout adds."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from deepseek_cases import deepseek_settings, write_deepseek
from engine_cases import LAYOUTS
from engine_ranks import run_ranks
from fp8_cases import fp8_settings, write_fp8_checkpoint
from plain_routing import aux_loss, gates, router_logits, z_loss
from router_jobs import gradients, last_router
from transformers import AutoModelForCausalLM

from moerl.config.schema.layout import Layout
from moerl.config.schema.train_config import FullRecompute
from moerl.types.batch import TrainBatch

COEFFICIENT = 0.5
AUX = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": COEFFICIENT}
Z = {"moe_z_loss_coeff": COEFFICIENT}
LOSSES = {"aux_loss": AUX, "z_loss": Z, "both-recomputed": AUX | Z}


def batch_of(*lengths):
    """Every advantage is 0, so that the gradient is that of the load-balancing losses alone."""
    rng, offsets = np.random.default_rng(1), np.concatenate([[0], np.cumsum(lengths)])
    total = int(offsets[-1])
    mask_T = np.ones(total, dtype=bool)
    mask_T[offsets[:-1]] = False
    return TrainBatch(
        token_ids_T=rng.integers(5, 90, size=total),
        response_mask_T=mask_T,
        rollout_logprobs_T=np.full(total, -4.5, dtype=np.float32),
        advantages_T=np.zeros(total, dtype=np.float32),
        offsets=offsets,
    )


BATCHES = {
    "uneven": batch_of(31, 31, 31, 31, 31, 5, 4, 3),
    # Context parallelism over four ranks pads five tokens with three: one rank holds two tokens of each sequence, the others one.
    "short": batch_of(*[5] * 20),
    # Under data parallelism one rank runs nothing but padding.
    "single": batch_of(5),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_deepseek(tmp_path_factory.mktemp("deepseek"), "plain")["plain"]


@pytest.fixture(scope="module")
def found(directory):
    """From a layout to its gradients by loss and batch. All of a layout share its processes."""

    @functools.cache
    def of(layout):
        chosen = [settings_of(directory, Layout() if layout == "one" else LAYOUTS[layout], loss) for loss in LOSSES]
        measured = run_ranks(gradients, chosen[0].train.layout.ranks, chosen, list(BATCHES.values()))
        return {loss: dict(zip(BATCHES, of_loss, strict=True)) for loss, of_loss in zip(LOSSES, measured, strict=True)}

    return of


def settings_of(directory, layout, loss):
    chosen = deepseek_settings(directory, layout, megatron=LOSSES[loss])
    if loss != "both-recomputed":
        return chosen
    return replace(chosen, train=replace(chosen.train, recompute=FullRecompute()))


@pytest.fixture(scope="module")
def plain(directory):
    """From loss, batch and micro-batches to the gradients of routers and their norm."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    def of(loss, batch, bins):
        model.zero_grad()
        total = torch.zeros(())
        for logits in router_logits(model, batch):
            micro_batches = [torch.cat([logits[member] for member in members]) for members in bins if members]
            total = total + COEFFICIENT * ("moe_z_loss_coeff" in LOSSES[loss]) * z_loss(micro_batches)
            total = total + COEFFICIENT * ("moe_aux_loss_coeff" in LOSSES[loss]) * aux_loss(micro_batches, top_k=4, is_sigmoid=True)
        total.backward()
        every = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        of_gates = {name: gradient.numpy() for name, gradient in every.items() if name.endswith(".mlp.gate.weight")}
        assert len(of_gates) == len(gates(model))
        return of_gates, float(torch.nn.utils.get_total_norm(list(every.values())))

    return of


def seldom(layout):
    """All cases of a layout together, which is measured once for them."""
    return pytest.param(layout, marks=pytest.mark.matrix(layout))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("layout", ["one", "cp2", "ep2", *(seldom(name) for name in ("dp2", "tp2", "pp2", "cp4", "tp2-cp2", "tp2-ep2"))])
def test_without_padding(layout, loss, batch, found, plain):
    result = found(layout)[loss][batch]
    expected, norm = plain(loss, BATCHES[batch], result.bins)
    assert result.norm == pytest.approx(norm, rel=1e-4, abs=1e-12)
    for name, gradient in expected.items():
        np.testing.assert_allclose(result.gates[name], gradient, atol=1e-5 * np.abs(gradient).max(), rtol=0, err_msg=name)


def test_without_settings_there_is_no_load_balancing_loss(directory):
    ((result,),) = run_ranks(gradients, 1, [deepseek_settings(directory, Layout())], [BATCHES["uneven"]])
    assert result.norm == 0.0


def test_the_batches_are_cut_unevenly_and_padded(found):
    sizes = sorted(int(BATCHES["uneven"].lengths[members].sum()) for members in found("dp2")["z_loss"]["uneven"].bins)
    assert len(sizes) == 4
    assert sizes[-1] > 1.5 * sizes[0]
    assert found("dp2")["z_loss"]["single"].bins.count([]) == 1
    assert found("cp4")["z_loss"]["short"].padding_fraction > 0.3


@pytest.mark.parametrize("loss", ["aux_loss", "z_loss"])
def test_padding_to_whole_fp8_blocks_does_not_count(loss, tmp_path):
    """Of the last router, from what it was given: FP8 rounds everything before it."""
    chosen = fp8_settings(write_fp8_checkpoint(tmp_path / "model"), Layout(ranks=2), recipe="blockwise", dtype="float32")
    chosen = replace(chosen, train=replace(chosen.train, megatron=LOSSES[loss]))
    result, micro_batches, weight = run_ranks(last_router, 2, chosen, BATCHES["uneven"])
    assert result.padding_fraction > 0.3
    weight = torch.from_numpy(weight).requires_grad_()
    logits = [torch.from_numpy(tokens) @ weight.T for tokens in micro_batches]
    total = z_loss(logits) if loss == "z_loss" else aux_loss(logits, top_k=2, is_sigmoid=False)
    (expected,) = torch.autograd.grad(COEFFICIENT * total, weight)
    found = result.gates["model.layers.1.mlp.gate.weight"]
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-5 * float(expected.abs().max()), rtol=0)
