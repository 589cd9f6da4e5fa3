"""Bytes that the planner counts, held against what real Megatron ranks hold after an update."""

import json
from dataclasses import replace

import pytest
from engine_cases import LAYOUTS, random_batch, settings
from engine_ranks import run_ranks
from family_cases import write_case
from planned_jobs import held_bytes, trained_bytes

from moerl.config.derive.model_configs import model_config, published_config
from moerl.config.derive.model_shape import read_config
from moerl.config.load import load
from moerl.config.schema.companion_config import DistillationConfig, TeacherConfig
from moerl.config.schema.train_config import MuonConfig
from moerl.planner.memory_plan import planned
from moerl.planner.parameter_counts import model_parameters, rank_parameters
from moerl.planner.rank_memory import companions_memory, muon_bytes, rank_memory

RECIPE = load(["recipe=grpo-tiny-moe-1n2g-sync"])
CASES = [
    ("qwen3", "dp2", "bfloat16", False), ("qwen3", "tp2", "float32", False), ("qwen3", "pp2-vpp2", "bfloat16", True),
    ("qwen3", "cp2", "bfloat16", False), ("untied-qwen3", "pp2", "bfloat16", False), ("untied-qwen3", "pp2-first3", "float64", True),
    ("qwen3_moe", "ep2", "bfloat16", True), ("qwen3_moe", "tp2-etp2", "bfloat16", False), ("qwen3_moe", "tp2", "bfloat16", False),
    ("untied-qwen3_moe", "tp2-ep2", "float32", False), ("untied-qwen3_moe", "cp2-ep2", "bfloat16", False),
    ("untied-qwen3_moe", "tp2-ep2-dp2", "bfloat16", False), ("deepseek_v3", "tp2-ep2", "bfloat16", True),
    ("deepseek_v3", "pp2-first3", "bfloat16", False),
]  # fmt: skip


@pytest.mark.parametrize(("model", "layout", "dtype", "has_reference"), CASES)
def test_ranks_hold_the_bytes_that_are_planned(model, layout, dtype, has_reference, checkpoints, tmp_path):
    """deepseek_v3: latent attention, and a layer of multi-token prediction."""
    is_family = model == "deepseek_v3"
    directory = write_case(model, tmp_path) if is_family else checkpoints[model]
    chosen = settings(directory, LAYOUTS[layout], dtype=dtype, uses_reference=has_reference)
    chosen = replace(chosen, train=replace(chosen.train, mtp_loss=0.1 if is_family else 0.0))
    hf, place = read_config(directory), chosen.train.layout
    algorithm = replace(RECIPE.algorithm, kl_coefficient=0.1 if has_reference else 0.0)
    planned = rank_memory(hf, replace(RECIPE, train=chosen.train, algorithm=algorithm))
    found = run_ranks(trained_bytes, place.ranks, chosen, random_batch())
    per_stage = place.ranks // place.pp
    for each in found:
        plan = planned[each["rank"] // per_stage].phases["update"]
        assert (each["weights"], each["gradients"]) == (plan["weights"], plan["gradients"])
        assert each["reference"] == pytest.approx(plan.get("reference", 0), rel=0.002)  # which has the biases of routers too
        assert each["optimizer"] <= plan["optimizer"]  # that of a whole shard, which may end in padding
    width = {"bfloat16": 12, "float32": 8, "float64": 16}[dtype]
    held = sum(
        width * (sum(chunk.dense) * per_stage // chunk.dense_shards + sum(chunk.experts) * per_stage // chunk.expert_shards)
        for chunks in rank_parameters(hf, chosen.train)
        for chunk in chunks
    )
    assert sum(each["optimizer"] for each in found) == held


def test_muon_has_no_second_moment_of_matrices(checkpoints):
    chosen = settings(checkpoints["untied-qwen3_moe"], LAYOUTS["dp2"], dtype="bfloat16")
    chosen = replace(chosen, train=replace(chosen.train, optimizer=replace(chosen.train.optimizer, muon=MuonConfig())))
    (plan,) = rank_memory(read_config(checkpoints["untied-qwen3_moe"]), replace(RECIPE, train=chosen.train))
    found = run_ranks(trained_bytes, 2, chosen, random_batch())
    assert all(0.9 * plan.phases["update"]["optimizer"] < each["optimizer"] <= plan.phases["update"]["optimizer"] for each in found), found


def test_muon_saves_a_large_model_a_third_of_its_optimizer():
    """Two times 4 bytes of each parameter instead of three, but for embedding and output layer; and 0.75 GiB to work in."""
    _, adam = plan_of()
    _, muon = plan_of("train.optimizer.muon={}")
    for before, after in zip(adam, muon, strict=True):
        assert after.phases["update"]["optimizer"] / before.phases["update"]["optimizer"] == pytest.approx(2 / 3, abs=0.03)
    assert muon_bytes(1, 10**9, "bfloat16") == 24 * 2**25


def plan_of(*overrides):
    config = load(["recipe=grpo-qwen3-235b-16n8g-sync", *overrides])
    return config, rank_memory(model_config(config.model), config)


FP8 = "train.fp8={recipe: tensorwise, format: hybrid}"
AWARE = "train.optimizer.memory.precision_aware=true"
NARROW = [f"train.optimizer.memory.{moment}_dtype=bfloat16" for moment in ("exp_avg", "exp_avg_sq")]


@pytest.mark.parametrize(
    ("before", "more", "phase", "kind", "times"),
    [
        (FP8, ["hardware=b200"], "update", "FP8 copies", 0.5),  # its units read an operand in either order
        (FP8, ["+train.megatron.disable_parameter_transpose_cache=true"], "update", "FP8 copies", 0),
        (AWARE, NARROW, "update", "optimizer", 8 / 12),
        (AWARE, NARROW, "save", "optimizer", 16 / 12),  # both widened beside it
        (AWARE, [], "save", "optimizer", 1),
    ],
)
def test_a_setting_changes_what_a_parameter_takes(before, more, phase, kind, times):
    (_, plain), (_, changed) = plan_of(before), plan_of(before, *more)
    for rank, other in zip(plain, changed, strict=True):
        assert other.phases[phase][kind] == pytest.approx(times * rank.phases["update"][kind], abs=8)
        assert rank.phases["update"][kind] > 0


def test_layers_that_stay_in_bfloat16_have_no_fp8_copies():
    _, ranks = plan_of("train.fp8={recipe: blockwise}")
    _, fewer = plan_of("train.fp8={recipe: blockwise, first_layers_bf16: 1, last_layers_bf16: 2}")
    before, after = (sum(rank.phases["update"]["FP8 copies"] for rank in each) for each in (ranks, fewer))
    assert after / before == pytest.approx(91 / 94, rel=1e-6)  # of layers that are all alike


def test_a_server_holds_the_copies_of_busy_experts():
    plain, copied = (
        planned(model_config(config.model), config)[1].weights
        for config in (load(["recipe=grpo-qwen3-235b-16n8g-sync", *words]) for words in ([], ["rollout.layout.redundant_experts=32"]))
    )
    _, experts = model_parameters(published_config("qwen3-235b-a22b"))
    assert copied - plain == pytest.approx(2 * experts * 32 / 128 / load(["recipe=grpo-qwen3-235b-16n8g-sync"]).rollout.layout.gpus, abs=4)


def test_a_critic_beside_the_policy_is_as_large_and_leaves_with_it():
    (_, alone), (config, beside) = plan_of(), plan_of("algorithm=ppo")
    assert config.train.offload == "all"
    for before, after in zip(alone, beside, strict=True):
        assert "companions" not in before.phases
        assert after.phases["update"]["companions"] == 0 == after.phases["push"]["companions"]
        static = sum(before.phases["update"][kind] for kind in ("weights", "gradients", "optimizer"))
        assert after.phases["load"]["companions"] == 0 == after.phases["save"]["companions"]  # the policy makes room first
        # Of the policy weights alone are there meanwhile.
        assert after.phases["companions"]["companions"] > static and "optimizer" not in after.phases["companions"]
        copies = "copies of what leaves the GPU"
        assert after.host[copies] == 2 * before.host[copies]


def test_models_that_only_answer_hold_weights_alone_and_those_on_their_own_ranks_nothing_of_the_policy_s(tmp_path):
    config, alone = plan_of("train.offload=none", "placement.mode=separate", "placement.nodes=64")
    hf = model_config(config.model)
    (tmp_path / "config.json").write_text(json.dumps(hf))
    teacher = TeacherConfig(path=str(tmp_path))
    taught = rank_memory(hf, replace(config, distillation=DistillationConfig(teachers={"one": teacher})))
    own = replace(teacher, layout=config.train.layout)
    apart = replace(config, distillation=DistillationConfig(teachers={"one": own}))
    for before, after in zip(alone, taught, strict=True):
        assert after.phases["update"]["companions"] == before.phases["update"]["weights"]
    assert rank_memory(hf, apart) == alone
    (found,) = companions_memory(hf, apart).values()
    assert set(found.phases) == {"load", "log-probs"}
    assert found.phases["load"]["optimizer"] == 0 == found.phases["log-probs"]["gradients"]
    assert found.phases["load"]["gradients"] == 2 * found.phases["load"]["weights"]  # float32, until the model is built


@pytest.mark.parametrize("trains", [True, False])
def test_a_model_that_does_not_train_has_no_buffers_of_gradients(trains, checkpoints):
    chosen = replace(settings(checkpoints["qwen3_moe"], LAYOUTS["ep2"], dtype="bfloat16"), trains=trains)
    (held, *_) = run_ranks(held_bytes, 2, chosen)
    assert (held["gradients"] > 0, held["optimizer"] > 0) == (trains, trains)
    assert held["parameters"] > 0
