"""Megatron computes what transformers computes from the same checkpoint, forward, backward and through the optimizer."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from engine_cases import LAYOUTS, random_batch, settings
from engine_jobs import train
from engine_ranks import run_ranks
from transformers import AutoModelForCausalLM

from moerl.config.layout import Layout
from moerl.models.checkpoint import HFCheckpoint

NAMES = ("qwen3", "qwen3_moe", "untied-qwen3", "untied-qwen3_moe")


def plain_logprobs(model, batch, temperature=1.0):
    """Log-probs with gradient, and entropies, [T] aligned with token_ids_T; one sequence after the other, no packing."""
    logprobs, entropies = [], []
    for start, end in pairwise(batch.offsets):
        tokens = torch.from_numpy(batch.token_ids_T[start:end])
        table = torch.log_softmax(model(input_ids=tokens[None]).logits[0, :-1] / temperature, dim=-1)
        nothing = table.new_zeros(1)
        logprobs.append(torch.cat([nothing, table.gather(1, tokens[1:, None])[:, 0]]))
        entropies.append(torch.cat([nothing, -(table.exp() * table).sum(-1)]))
    return torch.cat(logprobs), torch.cat(entropies)


def plain_step(model, batch, chosen):
    """One GRPO step by autograd and torch.optim.AdamW: loss, gradient norm, mean entropy, log-probs before."""
    logp_T, entropy_T = plain_logprobs(model, batch, chosen.temperature)
    mask_T, advantage_T = torch.from_numpy(batch.response_mask_T), torch.from_numpy(batch.advantages_T)
    # The old policy is the policy: the ratio is 1, no token is clipped.
    token_loss_T = -advantage_T * torch.exp(logp_T - logp_T.detach())
    loss = torch.stack([token_loss_T[a:b][mask_T[a:b]].mean() for a, b in pairwise(batch.offsets)]).mean()
    loss.backward()
    adam = chosen.train.optimizer
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), adam.clip_grad)
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": decayed, "weight_decay": adam.weight_decay}, {"params": others, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=adam.lr, betas=adam.betas, eps=adam.eps).step()
    return float(loss.detach()), float(norm), float(entropy_T[mask_T].mean().detach()), logp_T.detach().numpy()


def load(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


@pytest.mark.parametrize("layout", ["one", "tp2"])
@pytest.mark.parametrize("name", NAMES)
def test_a_training_step_equals_transformers_with_adamw(name, layout, checkpoints, tmp_path):
    batch, model = random_batch(), load(checkpoints[name])
    chosen = settings(checkpoints[name], Layout() if layout == "one" else LAYOUTS[layout])
    result = run_ranks(train, chosen.train.layout.ranks, chosen, batch, 1, 1)
    loss, norm, entropy, logprobs_T = plain_step(model, batch, chosen)
    np.testing.assert_allclose(result.before_T, logprobs_T, atol=2e-5, rtol=0)
    step = result.steps[0]
    assert (step.loss, step.grad_norm) == pytest.approx((loss, norm), rel=1e-4)
    assert step.entropy == pytest.approx(entropy, rel=1e-5)

    model.save_pretrained(tmp_path)
    with HFCheckpoint(tmp_path) as trained:
        for tensor_name, weight in result.weights.items():
            np.testing.assert_allclose(weight, trained.read(tensor_name).numpy(), atol=1e-5, rtol=0, err_msg=tensor_name)


@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_the_temperature_divides_the_logits(temperature, checkpoints):
    directory, batch = checkpoints["untied-qwen3_moe"], random_batch()
    chosen = settings(directory, Layout(), temperature=temperature)
    result = run_ranks(train, 1, chosen, batch, 1, 1)
    loss, norm, entropy, logprobs_T = plain_step(load(directory), batch, chosen)
    np.testing.assert_allclose(result.before_T, logprobs_T, atol=2e-5, rtol=0)
    assert (result.steps[0].loss, result.steps[0].grad_norm) == pytest.approx((loss, norm), rel=1e-4)
    assert result.steps[0].entropy == pytest.approx(entropy, rel=1e-5)


def test_the_first_token_of_a_sequence_has_no_logprob_and_sequences_do_not_see_each_other(checkpoints):
    """The same sequences in another order and in other company have the same log-probs."""
    directory, batch = checkpoints["untied-qwen3_moe"], random_batch()
    order = list(reversed(range(batch.num_sequences)))[:-1]
    forward, backward = (
        run_ranks(train, 1, settings(directory, Layout(), micro_batch_tokens=tokens), ordered, 0).before_T
        for tokens, ordered in ((64, batch), (4096, batch.select(order)))
    )
    expected_T = np.concatenate([forward[batch.offsets[i] : batch.offsets[i + 1]] for i in order])
    np.testing.assert_allclose(backward, expected_T, atol=1e-5, rtol=0)
    assert (forward[batch.offsets[:-1]] == 0).all()
