"""Megatron computes what transformers computes from the same checkpoint."""

import numpy as np
import pytest
import torch
from engine_ranks import random_batch, run_ranks, settings
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from moerl.algorithms.grpo import GRPO
from moerl.config.layout import Layout
from moerl.config.schema import GRPOConfig


def hf_logprobs(model, batch, temperature):
    """[T] aligned with token_ids_T, sequence by sequence, with gradient; and the entropy at each label."""
    logprobs, entropies = [], []
    for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        tokens = torch.from_numpy(batch.token_ids_T[start:end])
        logits = model(input_ids=tokens[None]).logits[0].float() / temperature
        table = torch.log_softmax(logits, dim=-1)
        labels = table[:-1].gather(1, tokens[1:, None])[:, 0]
        logprobs.append(torch.cat([labels.new_zeros(1), labels]))
        entropies.append(torch.cat([labels.new_zeros(1), -(table.exp() * table).sum(-1)[:-1]]))
    return torch.cat(logprobs), torch.cat(entropies)


def logprobs_and_update(engine, batch):
    logprobs_T = engine.logprobs(batch)
    return logprobs_T, engine.update(batch, GRPO(GRPOConfig()), lr=1e-3, num_updates=1)


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    """A Qwen3-MoE with an output layer of its own and a vocabulary that two ranks cannot halve, as transformers 5 writes it."""
    directory = tmp_path_factory.mktemp("untied")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=101, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=16, intermediate_size=16, norm_topk_prob=True, decoder_sparse_step=1,
        max_position_embeddings=32, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(directory)
    return directory


def check(directory, layout, tmp_path, *, temperature=1.0):
    batch = random_batch()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    expected_T, entropy_T = hf_logprobs(model, batch, temperature)
    logprobs_T, stats = run_ranks(logprobs_and_update, settings(directory, layout, temperature=temperature), tmp_path / "store", batch)
    np.testing.assert_allclose(logprobs_T, expected_T.detach().numpy(), atol=2e-5, rtol=0)
    mask_T = torch.from_numpy(batch.response_mask_T)
    assert stats.entropy == pytest.approx(float(entropy_T[mask_T].detach().mean()), rel=1e-5)

    # Ratio 1, no clipping: the gradient of GRPO's loss is that of -A * logp, averaged by sequence.
    advantage_T = torch.from_numpy(batch.advantages_T)
    per_token_T = torch.where(mask_T, -advantage_T * torch.exp(expected_T - expected_T.detach()), 0.0)
    spans = list(zip(batch.offsets[:-1], batch.offsets[1:], strict=True))
    loss = sum(per_token_T[a:b].sum() / mask_T[a:b].sum() for a, b in spans) / len(spans)
    loss.backward()
    norm = torch.sqrt(sum(parameter.grad.double().pow(2).sum() for parameter in model.parameters() if parameter.grad is not None))
    assert stats.loss == pytest.approx(float(loss.detach()), rel=1e-4, abs=1e-7)
    assert stats.grad_norm == pytest.approx(float(norm), rel=1e-4)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3"])
def test_logprobs_entropy_and_gradient_norm_equal_transformers(family, checkpoints, tmp_path):
    check(checkpoints[family], Layout(), tmp_path)


def test_the_temperature_divides_the_logits(checkpoints, tmp_path):
    check(checkpoints["qwen3_moe"], Layout(), tmp_path, temperature=0.7)


@pytest.mark.parametrize("tp", [1, 2])
def test_an_untied_output_layer_and_a_padded_vocabulary_equal_transformers(tp, untied, tmp_path):
    check(untied, Layout(ranks=tp, tp=tp), tmp_path)
