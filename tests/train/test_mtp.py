"""Multi-token prediction: its loss is the plain one, whatever the micro-batches; without a weight its layers are left alone."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from deepseek_cases import deepseek_settings, write_deepseek
from engine_cases import LAYOUTS, random_batch
from engine_jobs import new_engine, train
from engine_ranks import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from moerl.config.schema.layout import Layout
from moerl.train.batching.packed_sequences import pack
from moerl.train.loss.mtp_loss import MTPLoss
from moerl.types.batch import TrainBatch

NUM_LAYERS, DEPTHS = 4, 2


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_deepseek(tmp_path_factory.mktemp("deepseek"), "yarn")["yarn"]


# -- targets, without a model --------------------------------------------------------------------------------------

LENGTHS = st.lists(st.integers(1, 7), min_size=1, max_size=6)


def batch_of(lengths, mask):
    total = sum(lengths)
    column_T = np.zeros(total, dtype=np.float32)
    return TrainBatch(
        token_ids_T=np.arange(100, 100 + total),
        response_mask_T=np.array(mask[:total]),
        rollout_logprobs_T=column_T,
        advantages_T=column_T,
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
    )


def mtp_loss(batch, num_depths, logprobs=None):
    counts = tuple(batch.num_responses_from(depth + 1) for depth in range(1, num_depths + 1))
    return MTPLoss(batch=batch, counts=counts, coefficient=1.0, logprobs=logprobs)


@given(lengths=LENGTHS, mask=st.lists(st.booleans(), min_size=42, max_size=42), depth=st.integers(1, 3), cp=st.sampled_from([1, 2]))
def test_a_target_is_the_token_that_many_places_after_the_label_and_never_of_another_sequence(lengths, mask, depth, cp):
    batch = batch_of(lengths, mask)
    multiple = 2 * cp if cp > 1 else 1
    packed = pack(batch, range(len(lengths)), multiple, multiple)
    targets, seen = mtp_loss(batch, depth), []
    for rank in range(cp):
        part = packed.part_of(rank, cp)
        target_T, mask_T = targets.columns(part.label_index_T, depth)
        for token, label, target, counts in zip(part.token_ids_T, part.label_index_T, target_T, mask_T, strict=True):
            if counts:
                assert target == token + 1 + depth
                assert label + depth < batch.offsets[np.searchsorted(batch.offsets, label, side="right")]
                seen.append(int(target) - 100)
    expected = [t for a, b in pairwise(batch.offsets) for t in range(a + 1 + depth, b) if batch.response_mask_T[t]]
    assert sorted(seen) == expected
    assert targets.counts[depth - 1] == len(expected)


@given(lengths=LENGTHS, mask=st.lists(st.booleans(), min_size=42, max_size=42), data=st.data())
def test_the_shares_of_micro_batches_add_up_to_the_mean_over_depths_of_the_means_over_targets(lengths, mask, data):
    batch = batch_of(lengths, mask)
    table = torch.randn(DEPTHS, len(batch.token_ids_T) + 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    groups = [data.draw(st.integers(0, 2)) for _ in lengths]
    # "Logits" name their depth; a target's log-prob is looked up in a table. Padding and other positions give NaN.
    lookup = SimpleNamespace(depth=0)

    def logprobs(logits, target_T, asked_T):
        values = table[int(logits), torch.from_numpy(target_T)]
        return torch.where(torch.from_numpy(target_T) >= 100, values, torch.nan), lookup

    loss = mtp_loss(batch, DEPTHS, logprobs)
    depths = [torch.tensor(k) for k in range(DEPTHS)]
    packed = [pack(batch, [i for i, g in enumerate(groups) if g == group], 1) for group in range(3)]
    total = sum(loss.of(depths, micro.label_index_T) for micro in packed)
    means = []
    for depth in range(1, DEPTHS + 1):
        tokens = [batch.token_ids_T[t] for a, b in pairwise(batch.offsets) for t in range(a + 1 + depth, b) if batch.response_mask_T[t]]
        means.append(-table[depth - 1, tokens].mean() if tokens else torch.zeros((), dtype=torch.float64))
    torch.testing.assert_close(total, torch.stack(means).mean())


# -- against the plain computation ---------------------------------------------------------------------------------


def plain_model(directory):
    """transformers' model with as many decoder layers more, of which its forward uses the first NUM_LAYERS."""
    config = AutoConfig.from_pretrained(directory)
    config.num_hidden_layers = NUM_LAYERS + DEPTHS
    model = AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=torch.float32)
    model.config.num_hidden_layers = NUM_LAYERS
    tensors = load_file(directory / "model.safetensors")
    names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    model.extra = torch.nn.ParameterDict()
    for layer in range(NUM_LAYERS, NUM_LAYERS + DEPTHS):
        for name in names:
            full = f"model.layers.{layer}.{name}.weight"
            model.extra[full.replace(".", "/")] = torch.nn.Parameter(tensors[full])
    return model


def norm(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def plain_mtp_logprobs(model, tokens):
    """Of each depth [L - 1 - depth], for the tokens from 1 + depth on. Equation 21 to 24 of arXiv:2412.19437, one sequence at a time."""
    body = model.model
    hidden = body(input_ids=tokens[None]).last_hidden_state
    positions = torch.arange(len(tokens))[None]
    rotary = body.rotary_emb(hidden, positions)
    results = []
    for depth in range(1, DEPTHS + 1):
        layer = NUM_LAYERS + depth - 1
        enorm, hnorm, eh_proj, head_norm = (
            model.extra[f"model/layers/{layer}/{name}/weight"] for name in ("enorm", "hnorm", "eh_proj", "shared_head/norm")
        )
        # A depth sees the tokens up to its own; what stands past the end changes nothing before it.
        later = torch.cat([tokens[depth:], tokens.new_zeros(depth)])
        joined = torch.cat([norm(body.embed_tokens(later)[None], enorm), norm(hidden, hnorm)], dim=-1)
        hidden = norm(body.layers[layer](joined @ eh_proj.T, position_ids=positions, position_embeddings=rotary), head_norm)
        table = model.lm_head(hidden)[0].log_softmax(-1)[: max(len(tokens) - 1 - depth, 0)]
        results.append(table.gather(1, tokens[1 + depth :, None])[:, 0])
    return results


def plain_logprobs(model, tokens):
    """[T] of one sequence, with gradient; 0 for its first token."""
    table = torch.log_softmax(model(input_ids=tokens[None]).logits[0, :-1], dim=-1)
    return torch.cat([table.new_zeros(1), table.gather(1, tokens[1:, None])[:, 0]])


def plain_step(model, batch, chosen):
    """One GRPO step with multi-token prediction by autograd and AdamW: losses and gradient norm."""
    mask_T, advantage_T = torch.from_numpy(batch.response_mask_T), torch.from_numpy(batch.advantages_T)
    logp_T = torch.cat([plain_logprobs(model, torch.from_numpy(batch.token_ids_T[a:b])) for a, b in pairwise(batch.offsets)])
    token_loss_T = -advantage_T * torch.exp(logp_T - logp_T.detach())
    loss = torch.stack([token_loss_T[a:b][mask_T[a:b]].mean() for a, b in pairwise(batch.offsets)]).mean()
    depths = [[] for _ in range(DEPTHS)]
    for a, b in pairwise(batch.offsets):
        for depth, logp in enumerate(plain_mtp_logprobs(model, torch.from_numpy(batch.token_ids_T[a:b])), start=1):
            depths[depth - 1].append(-logp[mask_T[a + 1 + depth : b]])
    mtp_loss = torch.stack([torch.cat(parts).mean() for parts in depths]).mean()
    (loss + chosen.train.mtp_loss * mtp_loss).backward()
    adam = chosen.train.optimizer
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), adam.clip_grad)
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim > 1) == decays], "weight_decay": adam.weight_decay if decays else 0.0}
        for decays in (True, False)
    ]
    torch.optim.AdamW(groups, lr=adam.lr, betas=adam.betas, eps=adam.eps).step()
    return float(loss.detach()), float(mtp_loss.detach()), float(grad_norm)


@pytest.mark.parametrize("layout", ["one", "tp2", "pp2", "cp2"])
def test_a_training_step_equals_the_plain_computation(layout, directory, tmp_path):
    batch, model = random_batch(), plain_model(directory)
    chosen = deepseek_settings(directory, Layout() if layout == "one" else LAYOUTS[layout], mtp_loss=0.3)
    result = run_ranks(train, chosen.train.layout.ranks, chosen, batch, 1, 1)
    loss, mtp_loss, grad_norm = plain_step(model, batch, chosen)
    step = result.steps[0]
    assert (step.loss, step.mtp_loss) == pytest.approx((loss, mtp_loss), rel=1e-5, abs=1e-6)
    assert step.grad_norm == pytest.approx(grad_norm, rel=1e-4)
    for name, parameter in model.extra.items():
        np.testing.assert_allclose(result.weights[name.replace("/", ".")], parameter.detach().numpy(), atol=1e-5, rtol=0, err_msg=name)
    for name, parameter in model.named_parameters():
        if name in result.weights:
            np.testing.assert_allclose(result.weights[name], parameter.detach().numpy(), atol=1e-5, rtol=0, err_msg=name)
    copies = ("embed_tokens", "shared_head.head")
    for copy, original in zip(copies, ("model.embed_tokens.weight", "lm_head.weight"), strict=True):
        np.testing.assert_array_equal(result.weights[f"model.layers.{NUM_LAYERS}.{copy}.weight"], result.weights[original])


@pytest.mark.parametrize("tokens", [20, 4096])
def test_the_loss_does_not_depend_on_micro_batches(tokens, directory):
    options = {"mtp_loss": 0.3, "dtype": "float64"}
    expected = run_ranks(train, 1, deepseek_settings(directory, Layout(), **options), random_batch(), 1)
    result = run_ranks(train, 1, deepseek_settings(directory, Layout(), micro_batch_tokens=tokens, **options), random_batch(), 1)
    for step, wanted in zip(result.steps, expected.steps, strict=True):
        assert step.mtp_loss == pytest.approx(wanted.mtp_loss, rel=1e-8)
        assert step.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-7)


def test_a_rank_without_sequences_predicts_nothing(directory):
    expected, result = (
        run_ranks(
            train, layout.ranks, deepseek_settings(directory, layout, mtp_loss=0.3, dtype="float64"), random_batch(num_sequences=1), 1
        )
        for layout in (Layout(), LAYOUTS["dp2"])
    )
    for step, wanted in zip(result.steps, expected.steps, strict=True):
        assert (step.mtp_loss, step.grad_norm) == pytest.approx((wanted.mtp_loss, wanted.grad_norm), rel=1e-7)


# -- its weight ----------------------------------------------------------------------------------------------------


def parameters_of_mtp(settings):
    return [name for chunk in new_engine(settings).model.chunks for name, _ in chunk.named_parameters() if "mtp" in name]


def test_without_a_weight_its_layers_are_not_built_and_leave_as_they_came(directory):
    chosen = deepseek_settings(directory, Layout())
    assert run_ranks(parameters_of_mtp, 1, chosen) == []
    result = run_ranks(train, 1, chosen, random_batch(), 1)
    assert result.steps[0].mtp_loss is None
    original = load_file(directory / "model.safetensors")
    own = [name for name in original if name.startswith(("model.layers.4.", "model.layers.5."))]
    for name in own:
        is_copy = name.endswith(("embed_tokens.weight", "shared_head.head.weight"))
        assert np.array_equal(result.weights[name], original[name].numpy()) != is_copy, name


def test_with_a_weight_its_loss_falls_and_the_policy_gets_its_gradient_too(directory):
    batch = random_batch()
    weighted = run_ranks(train, 1, deepseek_settings(directory, Layout(), mtp_loss=0.3), batch, 5)
    plain = run_ranks(train, 1, deepseek_settings(directory, Layout()), batch, 1)
    np.testing.assert_array_equal(weighted.before_T, plain.before_T)
    assert weighted.steps[0].grad_norm != plain.steps[0].grad_norm
    losses = [step.mtp_loss for step in weighted.steps]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.3
