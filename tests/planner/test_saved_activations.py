"""Bytes that the planner says a micro-batch keeps, held against storages that autograd keeps in real Megatron on CPU.

With the sizes of the CPU's reference modules in the place of Transformer Engine's (reference_sizes.py); the rest is the same code.
"""

from dataclasses import replace

import pytest
from engine_cases import random_batch, settings
from engine_ranks import run_ranks
from family_cases import _DECODER, CASES
from planned_jobs import kept_bytes, most_kept_bytes
from reference_sizes import ReferenceKernels

from moerl.config.derive.model_shape import read_config
from moerl.config.load import load
from moerl.config.schema.layout import Layout
from moerl.config.schema.memory_config import FullRecompute, NoRecompute, SelectiveRecompute
from moerl.config.schema.train_config import FP8Config, OptimizerConfig, TrainConfig
from moerl.planner.saved_activations import Kernels, Tokens
from moerl.planner.stage_activations import StageModel

RECIPE = load(["recipe=grpo-tiny-moe-1n2g-sync"])
NUM_TOKENS, NUM_SEQUENCES = 512, 4
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
    for family in ("qwen2", "qwen2_moe", "mixtral", "qwen3", "qwen3_moe", "glm4_moe", "llama-3.1"):
        yield "one", family, "off"
    for recompute in ("core_attn", "mlp", "full"):
        yield "one", "qwen3", recompute
    for layout in ("tp2", "cp2"):
        yield layout, "qwen3", "off"
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
        if planned != pytest.approx(kept.num_bytes, rel=0.05):
            wrong[family, recompute] = planned / kept.num_bytes
    assert wrong == {}
