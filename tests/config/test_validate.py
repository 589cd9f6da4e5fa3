"""Rules across fields: one override (or a few) that breaks each, and what is said."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest

from moerl.config.load import load
from moerl.types.engine_traits import TRAITS
from moerl.types.errors import ConfigError, Problem

DEMO = "recipe=grpo-tiny-moe-1n2g-sync"
WARM = "recipe=grpo-tiny-add-1n2g-sync"
DAPO = "recipe=dapo-tiny-moe-1n2g-async"
MEGATRON = "train.megatron.moe_router_"


def problems_of(*overrides: str) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        load(overrides)
    return caught.value.problems


def words(overrides: str) -> list[str]:
    """A layout in braces replaces the recipe's, not only the sizes it names."""
    return overrides.replace("train.layout={", "~train.layout train.layout={").split()


@pytest.mark.parametrize(
    "overrides",
    [
        "train.layout={ranks:3}",
        "train.layout={ranks:2,tp:2}",
        "train.layout={ranks:4,ep:2,etp:2}",
        "train.recompute.kind=full",
        "train.updates_per_step=256",
        "model.scratch.family=deepseek_v3 train.mtp_loss=0.1 train.megatron={moe_router_bias_update_rate:0.001}",
        "train.megatron={moe_router_load_balancing_type:aux_loss,moe_aux_loss_coeff:0.01}",
        "train.router_replay=rollout",
        "train.router_replay=trainer train.megatron={moe_router_fusion:false,moe_token_dispatcher_type:alltoall}",
        "train.megatron={moe_router_fusion:true}",
        "rollout.port=65534 rollout.num_servers=2",
        "train.micro_batch_tokens=32",
        "rollout.max_response_tokens=16",
        "deterministic=false spare_groups=8",
        "deterministic=false max_staleness=1 groups_in_flight=33 train.old_logprobs=rollout",
    ],
)
def test_settings_at_the_edge_of_a_rule_are_accepted(overrides: str):
    load([DEMO, *words(overrides)])


@pytest.mark.parametrize(
    ("recipe", "overrides", "path", "said"),
    [
        (DEMO, "name=a/b", "name", "letters, digits"),
        (DEMO, "group_size=1", "group_size", "one sample has advantage 0"),
        (DAPO, "group_size=1", "group_size", "must be at least 2"),
        (DEMO, "train.updates_per_step=257", "train.updates_per_step", "must be at most 256"),
        (DEMO, "max_staleness=1 train.old_logprobs=rollout", "deterministic", "needs max_staleness=0"),
        (DEMO, "groups_in_flight=64", "groups_in_flight", "needs max_staleness > 0"),
        (DAPO, "groups_in_flight=32", "groups_in_flight", "must be in [33, 64]"),
        (DAPO, "groups_in_flight=65", "groups_in_flight", "groups_in_flight=64, or leave it out"),
        (DAPO, "groups_in_flight=48 spare_groups=4", "groups_in_flight", "has no effect with spare_groups"),
        (DAPO, "spare_groups=33", "spare_groups", "spare_groups=8"),
        (DAPO, "spare_groups=1 num_steps=2", "spare_groups", "num_steps=2 leaves no step"),
        (DEMO, "spare_groups=1", "deterministic", "needs spare_groups=0"),
        (DEMO, "rollout.partial=true", "rollout.partial", "has no effect"),
        # A rank waits for another by calls that take no more: both ended the run.
        (DEMO, "deadlines.update_seconds=1e400", "deadlines.update_seconds", "must be a number > 0 and <= 1000000"),
        (DEMO, "deadlines.update_seconds=3e6", "deadlines.update_seconds", "must be a number > 0 and <= 1000000"),
        (DEMO, "rollout.cache_high=90", "rollout.cache_high", "must be above 0 and at most 1"),
        (DEMO, "rollout.cache_high=0", "rollout.cache_high", "rollout.cache_high=0.9"),
        (DAPO, "train.old_logprobs=trainer", "train.old_logprobs", "train.old_logprobs=rollout"),
        (DEMO, "model.scratch=null", "model", "neither is given"),
        (DEMO, "model.path=/nowhere/at-all model.scratch=null", "model.path", "download the model there"),
        (DEMO, "model.path=nowhere model.scratch=null", "model.path", "absolute path"),
        (DEMO, "model.scratch.num_kv_heads=3", "model.scratch.num_kv_heads", "must divide num_heads=4"),
        (DEMO, "model.scratch.head_dim=7", "model.scratch.head_dim", "must be even"),
        (DEMO, "model.scratch.experts_per_token=9", "model.scratch.experts_per_token", "at most num_experts=8"),
        (DEMO, "rollout.max_response_tokens=32", "rollout.max_response_tokens", "must be less than 32"),
        (DEMO, "rollout.max_response_tokens=17", "data.max_prompt_tokens", "model.max_context=33"),
        (DEMO, "train.micro_batch_tokens=31", "train.micro_batch_tokens", "train.micro_batch_tokens=32"),
        (DEMO, "train.layout={ranks:2,tp:2} train.micro_batch_tokens=4095", "train.micro_batch_tokens", "must be a multiple of 2"),
        (DEMO, "train.layout={ranks:3,tp:2}", "train.layout.ranks", "ranks=2 or ranks=4"),
        (DEMO, "train.layout={ranks:3,ep:2}", "train.layout.ranks", "ep * etp * pp"),
        (DEMO, "train.layout={ranks:8,tp:8}", "train.layout.tp", "4 attention heads"),
        (DEMO, "train.layout={ranks:4,tp:4}", "train.layout.tp", "2 key/value heads"),
        (DEMO, "train.layout={ranks:3,ep:3}", "train.layout.ep", "8 experts"),
        (DEMO, "model.scratch.family=qwen3", "train.layout.ep", "must be 1 for a dense model"),
        (DEMO, "train.mtp_loss=0.1", "train.mtp_loss", "no num_nextn_predict_layers"),
        (DEMO, "model.scratch.family=deepseek_v3 model.scratch.head_dim=6", "model.scratch.head_dim", "model.scratch.head_dim=8"),
        (DEMO, "model.scratch.family=deepseek_v3 model.scratch.experts_per_token=1", "model.scratch.experts_per_token", "multiple of 2"),
        (DEMO, "train.megatron={moe_router_load_balancing_type:global_aux_loss}", MEGATRON + "load_balancing_type", "none or aux_loss"),
        (DEMO, "train.megatron={moe_aux_loss_coeff:0.01}", "train.megatron.moe_aux_loss_coeff", "no loss to weigh"),
        (DEMO, "train.megatron={moe_router_bias_update_rate:0.01}", MEGATRON + "bias_update_rate", "routers have no bias"),
        (DEMO, "model.scratch.family=qwen3 train.router_replay=trainer", "train.router_replay", "must be off for a dense model"),
        (DEMO, "model.scratch.family=qwen3 train.router_replay=rollout", "train.router_replay", "must be off for a dense model"),
        (DEMO, "train.router_replay=trainer train.megatron={moe_router_fusion:true}", MEGATRON + "fusion", "takes no routes"),
        (DEMO, "train.megatron={overlap_p2p_comm_warmup_flush:true}", "train.megatron.overlap_p2p_comm_warmup_flush", "vpp > 1"),
        (DEMO, "train.megatron={moe_enable_deepep:true}", "train.megatron.moe_enable_deepep", "moe_token_dispatcher_type=flex"),
        (DEMO, "train.megatron={cuda_graph_impl:local}", "train.megatron.cuda_graph_impl", "one length of micro-batches"),
        (DEMO, "train.megatron={moe_enable_routing_replay:true}", "train.megatron.moe_enable_routing_replay", "set train.router_replay"),
        (DEMO, "train.megatron={mtp_num_layers:1}", "train.megatron.mtp_num_layers", "config.json"),
        (DEMO, "train.layout={ranks:3,pp:3}", "train.layout.pp", "must divide the model's 4 layers"),
        (DEMO, "train.layout={ranks:2,pp:2,first_stage_layers:4}", "train.layout.first_stage_layers", "leave 0 layers for 1 other stages"),
        (DEMO, "train.layout={ranks:2,pp:2,vpp:2,first_stage_layers:3}", "train.layout.first_stage_layers", "multiple of vpp=2"),
        (DEMO, "train.layout={ranks:2,pp:2,first_stage_layers:3,loss_as_layer:true}", "train.layout.loss_as_layer", "cannot be combined"),
        (DEMO, "train.layout.loss_as_layer=true", "train.layout.loss_as_layer", "needs pp > 1"),
        (DEMO, "train.layout={ranks:32,cp:32}", "train.layout.cp", "must be at most 16 for model.max_context=32"),
        (DEMO, "train.layout={ranks:9,cp:9,ep:1}", "train.micro_batch_tokens", "must be a multiple of 18"),
        (DEMO, "train.layout.vpp=2", "train.layout.vpp", "needs pp > 1"),
        (DEMO, "train.optimizer.min_lr=1", "train.optimizer.min_lr", "must be at most lr=0.001"),
        (DEMO, "train.optimizer.decay=cosine num_steps=10", "train.optimizer.warmup_steps", "must be less than num_steps=10"),
        (WARM, "sft.lr=1e-5 train.optimizer={decay:linear,min_lr:1e-4}", "sft.lr", "must be at least train.optimizer.min_lr=0.0001"),
        (WARM, "sft.warmup_steps=9 sft.num_steps=9 train.optimizer.decay=cosine", "sft.warmup_steps", "must be less than sft.num_steps=9"),
        (DEMO, "train.optimizer.betas=[0.9,1.0]", "train.optimizer.betas.1", "must be in [0, 1)"),
        (DAPO, "algorithm.overlong_buffer=null", "algorithm.overlong_buffer", "must be given"),
        (DAPO, "algorithm.overlong_buffer=12", "algorithm.overlong_buffer", "must be less than rollout.max_response_tokens=12"),
        (DAPO, "algorithm.overlong=mask", "algorithm.overlong_buffer", "has no effect"),
        (DEMO, "reward.terms.repeat.kind=gym", "reward.terms.repeat.kind", "needs data.kind=gym"),
        (DEMO, "rollout.port=65535 rollout.num_servers=2", "rollout.port", "rollout.port=65534 or lower"),
        (DEMO, "rollout.python=/nowhere/python", "rollout.python", "is not a file"),
        (DEMO, "train.megatron.tensor_model_parallel_size=2", "train.megatron.tensor_model_parallel_size", "set train.layout.tp instead"),
        (DEMO, "train.megatron.num_layers=2", "train.megatron.num_layers", "config.json"),
        (DEMO, "train.megatron.moe_aux_loss_coef=0.1", "train.megatron.moe_aux_loss_coef", "train.megatron.moe_aux_loss_coeff?"),
        (DEMO, "train.megatron.init_method=x", "train.megatron.init_method", "cannot be written in a file"),
    ],
)
def test_each_rule_says_what_is_wrong_and_what_to_write(recipe: str, overrides: str, path: str, said: str):
    found = [problem for problem in problems_of(recipe, *words(overrides)) if problem.path == path and said in str(problem)]
    assert found
    assert all(problem.rule and problem.reason and problem.fix for problem in found)


def test_wandb_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, find=importlib.util.find_spec: None if name == "wandb" else find(name))
    (problem,) = problems_of(DEMO, "observe.wandb=online")
    assert (problem.path, problem.rule) == ("observe.wandb", "needs wandb")


QWEN3_MOE = {
    "rope_theta": 10000.0,
    "model_type": "qwen3_moe",
    "vocab_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "hidden_size": 16,
    "intermediate_size": 16,
    "rms_norm_eps": 1e-6,
    "norm_topk_prob": True,
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The files validation looks at; none of them is opened but config.json and the index."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_MOE))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}))
    for name in ("m-1.safetensors", "m-2.safetensors"):
        (tmp_path / name).touch()
    return tmp_path


def with_checkpoint(path: Path, *more: str) -> list[str]:
    return [DEMO, "model.scratch=null", f"model.path={path}", *more]


def test_a_complete_checkpoint_is_accepted_and_its_shape_is_used(checkpoint: Path):
    assert load(with_checkpoint(checkpoint)).model.path == str(checkpoint)
    (problem,) = problems_of(*with_checkpoint(checkpoint, "train.layout.ep=8", "train.layout.ranks=8"))
    assert "4 experts" in problem.rule
    (problem,) = problems_of(*with_checkpoint(checkpoint, "model.max_context=65"))
    assert (problem.path, problem.fix) == ("model.max_context", "model.max_context=64")


def test_path_and_scratch_together_are_refused(checkpoint: Path):
    (problem,) = problems_of(DEMO, f"model.path={checkpoint}")
    assert problem.value == "both are given"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda p: (p / "config.json").unlink(), "needs a readable config.json"),
        (lambda p: (p / "config.json").write_text("{"), "needs a readable config.json"),
        (lambda p: (p / "config.json").write_text("[]"), "holds no object"),
        (lambda p: (p / "config.json").write_text(json.dumps({**QWEN3_MOE, "model_type": "qwen4_moe"})), "the nearest is qwen3_moe"),
        (lambda p: (p / "tokenizer.json").unlink(), "has no tokenizer"),
        (lambda p: (p / "m-2.safetensors").unlink(), "names 1 absent files: m-2.safetensors"),
        (lambda p: (p / "model.safetensors.index.json").unlink(), "has no weights"),
        (lambda p: (p / "model.safetensors.index.json").write_text("?"), "needs a readable model.safetensors.index.json"),
    ],
)
def test_a_damaged_checkpoint_is_named_before_anything_starts(checkpoint: Path, damage, said: str):
    damage(checkpoint)
    (problem,) = problems_of(*with_checkpoint(checkpoint))
    assert problem.path == "model.path"
    assert said in str(problem)


@pytest.mark.parametrize(
    ("files", "options"),
    [
        ([".metadata", "common.pt"], " --files-from MODEL"),
        (["latest_checkpointed_iteration.txt"], " --files-from MODEL"),
        (["model/dist_ckpt/.metadata"], " --files-from MODEL"),
        (["manifest.json", "state.json", ".metadata"], ""),
    ],
)
def test_a_sharded_checkpoint_as_the_model_is_told_to_be_converted(tmp_path: Path, files, options: str):
    for name in files:
        (tmp_path / "saved" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "saved" / name).touch()
    (problem,) = problems_of(*with_checkpoint(tmp_path / "saved"))
    assert problem.path == "model.path" and problem.rule == "must be a Hugging Face folder"
    assert f"moerl convert {tmp_path / 'saved'} FOLDER{options}" in problem.fix


def test_a_run_as_the_model_is_told_to_be_converted(tmp_path: Path):
    (step := tmp_path / "saved" / "checkpoints" / "step-000003").mkdir(parents=True)
    (step / "manifest.json").touch()
    (problem,) = problems_of(*with_checkpoint(tmp_path / "saved"))
    assert problem.fix.startswith(f"moerl convert {tmp_path / 'saved' / 'checkpoints' / 'step-N'} FOLDER, ")


def test_a_config_json_without_a_needed_size_is_a_problem(checkpoint: Path):
    (checkpoint / "config.json").write_text(json.dumps({k: v for k, v in QWEN3_MOE.items() if k != "num_attention_heads"}))
    (problem,) = problems_of(*with_checkpoint(checkpoint))
    assert "num_attention_heads" in str(problem)


def test_an_engine_that_returns_no_routes_is_refused_for_replaying_them(monkeypatch):
    for engine in ("hf", "sglang"):
        monkeypatch.setitem(TRAITS, engine, replace(TRAITS[engine], no_routes="a reason"))
    (problem,) = problems_of(DEMO, "train.router_replay=rollout")
    assert (problem.path, problem.rule) == ("train.router_replay", "needs rollout.engine of fake")


def test_router_replay_with_vllm_is_refused_with_the_reason():
    problems = problems_of(DEMO, "rollout.engine=vllm", "rollout.python=/absent", "train.router_replay=rollout")
    (replay,) = [problem for problem in problems if problem.path == "train.router_replay"]
    assert "second model runner" in replay.reason and replay.fix == "train.router_replay=trainer, or rollout.engine=hf"


def test_deltas_on_disk_are_refused_with_an_engine_that_cannot_give_back_its_weights():
    def refused(*overrides):
        problems = problems_of(DEMO, "rollout.engine=sglang", "weights.transport=disk", "rollout.python=/absent", *overrides)
        return [problem.fix for problem in problems if problem.path == "weights.disk_delta"]

    assert refused() == ["weights.disk_delta=false"]
    assert refused("weights.disk_delta=false") == []


def test_deltas_on_disk_are_refused_with_servers_that_drop_their_weights():
    colocated = (DEMO, "weights.transport=disk", "placement.mode=colocated", "train.offload=all")
    (found,) = [problem for problem in problems_of(*colocated) if problem.path == "weights.disk_delta"]
    assert (found.rule, found.fix) == ("needs placement.mode=separate", "weights.disk_delta=false")
