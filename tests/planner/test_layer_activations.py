"""Bytes that the planner says a micro-batch keeps, held against storages that autograd keeps in real Megatron on CPU.

With the sizes of the CPU's reference modules in the place of Transformer Engine's (reference_sizes.py); the rest is the same code.
"""

from dataclasses import replace

import engine_cases
import numpy as np
import pytest
import torch
from engine_cases import settings
from engine_ranks import run_ranks
from family_cases import _DECODER, CASES, write_case
from planned_jobs import kept_bytes, most_kept_bytes, most_live_bytes
from reference_sizes import ReferenceKernels
from torch.nn import functional

from moerl.config.derive.model_shape import read_config
from moerl.config.load import load
from moerl.config.schema.layout import Layout
from moerl.config.schema.train_config import FullRecompute, NoRecompute, OptimizerConfig, SelectiveRecompute, TrainConfig
from moerl.models.find_family import find_family
from moerl.planner.layer_activations import Kernels, Tokens
from moerl.planner.stage_activations import StageModel
from moerl.train.megatron.fusions import FusedKernels, fusions
from moerl.types.batch import TrainBatch

ON_GPU = FusedKernels(on_gpu=True, has_rope=True, has_permutation=True, has_gradient_accumulation=True)
RECIPE = load(["recipe=grpo-tiny-moe-1n2g-sync"])
NUM_TOKENS, NUM_SEQUENCES = 512, 4
NUMBER_BYTES = 4 * 8 * NUM_TOKENS
"""Ids, positions, labels and places of tokens, as int64: what no plan counts, and shows in a model whose hidden states have 64 bytes."""
LAYOUTS = {
    "one": Layout(), "tp2": Layout(ranks=2, tp=2), "cp2": Layout(ranks=2, cp=2), "ep2": Layout(ranks=2, ep=2),
    "tp2-etp2": Layout(ranks=2, tp=2, etp=2), "tp2-ep2": Layout(ranks=4, tp=2, ep=2),
}  # fmt: skip
MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
_MLA = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe_act", "shared_experts")
RECOMPUTES = {
    "off": NoRecompute(), "full": FullRecompute(), "units of two": FullRecompute(num_layers=2),
    "block of one": FullRecompute(method="block", num_layers=1),
    "two modules": SelectiveRecompute(modules=("layernorm", "moe_act")), "all of latent attention": SelectiveRecompute(modules=_MLA),
    **{module: SelectiveRecompute(modules=(module,)) for module in MODULES},
}  # fmt: skip


def cases():
    """(name, layout, model, recompute)"""
    for recompute in RECOMPUTES:
        yield "one", "deepseek_v3", recompute
    for family in ("qwen2", "qwen2_moe", "mixtral", "qwen3", "qwen3_moe", "glm4_moe", "llama-3.1", "minimax_m2"):
        yield "one", family, "off"
    for recompute in ("core_attn", "mlp", "full"):
        yield "one", "qwen3", recompute
    for layout in ("tp2", "cp2"):
        yield layout, "qwen3", "off"
    yield "tp2", "minimax_m2", "off"
    for layout in ("tp2", "cp2", "ep2", "tp2-etp2", "tp2-ep2"):
        yield layout, "qwen3_moe", "off"
        yield layout, "deepseek_v3", "all of latent attention"
    yield "tp2", "qwen3_moe", "two modules"
    yield "tp2", "deepseek_v3", "off"


def train_config(layout, family, recompute):
    # Multi-token prediction is recomputed a layer at a time, or not (Megatron).
    hf = CASES[family]
    has_mtp = hf.get("num_nextn_predict_layers") and recompute != "units of two"
    return TrainConfig(
        optimizer=OptimizerConfig(lr=1e-3), layout=LAYOUTS[layout], recompute=RECOMPUTES[recompute], micro_batch_tokens=NUM_TOKENS,
        mtp_loss=0.1 if has_mtp else 0.0,
    )  # fmt: skip


def model(family):
    """Large enough for what grows with tokens alone not to matter."""
    return _DECODER | CASES[family] | {"max_position_embeddings": NUM_TOKENS}


def run_config(train):
    return replace(RECIPE, train=train, groups_per_step=64, group_size=64, model=replace(RECIPE.model, max_context=NUM_TOKENS))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("megatron", [{}, {"bias_activation_fusion": False}, {"use_te_activation_func": True}], ids=str)
def test_the_kernel_of_swiglu_is_planned_where_a_rank_on_a_gpu_takes_it(name, megatron):
    """By itself too (docs/gpu.md): without recomputation what it does not keep is a fifth of the activations."""
    fields = find_family(model(name)).transformer_config(model(name))
    train = replace(train_config("one", name, "off"), megatron=megatron)
    silu = functional.silu if fields.get("activation_func", "silu") == "silu" else functional.gelu
    takes = fusions(ON_GPU, fields | {"activation_func": silu, "params_dtype": torch.bfloat16} | megatron).settings() | megatron
    assert Kernels(train).fuses_activation(fields) == takes["bias_activation_fusion"]
    assert not Kernels(train, on_gpu=False).fuses_activation(fields)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_micro_batch_keeps_the_bytes_that_are_planned(layout):
    chosen = [case for case in cases() if case[0] == layout]
    configs = [train_config(*case) for case in chosen]
    found = run_ranks(
        kept_bytes,
        LAYOUTS[layout].ranks,
        [(model(case[1]), train) for case, train in zip(chosen, configs, strict=True)],
        NUM_TOKENS,
        NUM_SEQUENCES,
    )
    wrong = {}
    for (_, family, recompute), train, kept in zip(chosen, configs, found, strict=True):
        hf, config = model(family), run_config(train)
        kernels = ReferenceKernels(train, num_sequences=NUM_SEQUENCES)
        fields = StageModel(hf, config)._fields
        mean = Tokens.of(fields, train.layout, NUM_TOKENS).routed
        planned = StageModel(hf, config, imbalance=kept.routed / mean if mean else 1.0, kernels=kernels).stages()[0].kept
        if planned != pytest.approx(kept.num_bytes, rel=0.05, abs=NUMBER_BYTES):
            wrong[family, recompute] = planned / kept.num_bytes
    assert wrong == {}


def equal_batch(num_sequences, length):
    offsets = np.arange(num_sequences + 1) * length
    total = num_sequences * length
    return TrainBatch(
        token_ids_T=np.arange(total) % 90 + 5,
        response_mask_T=np.arange(total) % length > 1,
        rollout_logprobs_T=np.full(total, -4.5, dtype=np.float32),
        advantages_T=np.sin(np.arange(total)).astype(np.float32),
        offsets=offsets,
    )


@pytest.mark.parametrize("recompute", ["off", "full", "mlp"])
@pytest.mark.parametrize("layout", ["pp2", "pp2-vpp2"])
def test_stages_keep_the_micro_batches_that_are_under_way(layout, recompute, checkpoints):
    """The first stage, which has most of them, and no logits: in a whole update, with what is computed again."""
    length, num_tokens, num_micro_batches = 32, 256, 6
    engine = settings(checkpoints["untied-qwen3"], engine_cases.LAYOUTS[layout], dtype="bfloat16", micro_batch_tokens=num_tokens)
    train = replace(engine.train, recompute=RECOMPUTES[recompute])
    num_sequences = num_micro_batches * num_tokens // length
    found = run_ranks(most_kept_bytes, 2, replace(engine, train=train), equal_batch(num_sequences, length))
    config = replace(run_config(train), groups_per_step=num_sequences, group_size=1, model=replace(RECIPE.model, max_context=length))
    stage = StageModel(
        read_config(checkpoints["untied-qwen3"]), config, kernels=ReferenceKernels(train, num_sequences=num_tokens // length)
    )
    planned = stage.stages()[0]
    sent = sum(stage._under_way(0).values()) * stage._hidden()  # outputs, which Megatron keeps, not autograd
    assert planned.kept - sent + planned.recomputed == pytest.approx(found[0], rel=0.05)


@pytest.mark.parametrize(
    ("family", "recompute", "vocab_size", "mtp_loss"),
    [("qwen3", "off", 100, 0.0), ("qwen3_moe", "full", 100, 0.0), ("deepseek_v3", "full", 4000, 0.1), ("deepseek_v3", "full", 4000, 0.0)],
)
def test_an_update_needs_no_more_than_is_planned(family, recompute, vocab_size, mtp_loss, tmp_path):
    """Every tensor there is at the worst moment: what is kept, what a layer moves, logits and their gradients. One rank."""
    length, num_tokens = 32, 512
    directory = write_case(family, tmp_path, vocab_size=vocab_size)
    engine = settings(directory, Layout(), dtype="bfloat16", micro_batch_tokens=num_tokens)
    train = replace(engine.train, recompute=RECOMPUTES[recompute], mtp_loss=mtp_loss, logprob_chunk_tokens=64)
    num_sequences = 2 * num_tokens // length
    found = run_ranks(most_live_bytes, 1, replace(engine, train=train), equal_batch(num_sequences, length))
    config = replace(run_config(train), groups_per_step=num_sequences, group_size=1, model=replace(RECIPE.model, max_context=length))
    kernels = ReferenceKernels(train, num_sequences=num_tokens // length)
    (planned,) = StageModel(read_config(directory), config, kernels=kernels).stages()
    assert planned.kept + planned.update == pytest.approx(found, rel=0.15)
