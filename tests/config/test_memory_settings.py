"""Rules of recomputation, offload, overlap and the optimizer's memory: what breaks each, and what is said."""

import pytest

from moerl.config.load import load
from moerl.config.schema.train_config import FullRecompute, SelectiveRecompute
from moerl.types.errors import ConfigError

DEMO = "recipe=grpo-tiny-moe-1n2g-sync"
DENSE = "model.scratch.family=qwen3 train.layout={ranks:1}"
PIPELINE = "train.layout={ranks:2,pp:2}"  # two layers a stage
DEEPSEEK = "model.scratch.family=deepseek_v3 model.scratch.mtp_layers=1"
MEMORY = "train.optimizer.memory"


def words(overrides):
    return [DEMO, *overrides.replace("train.layout={", "~train.layout train.layout={").split()]


@pytest.mark.parametrize(
    ("overrides", "path", "said"),
    [
        ("train.recompute.kind=all", "train.recompute.kind", "must be one of"),
        ("train.recompute={kind:full,num_layers:5}", "train.recompute.num_layers", "must be at most 4"),
        (f"{PIPELINE} train.recompute={{kind:full,method:block,num_layers:3}}", "train.recompute.num_layers", "must be at most 2"),
        ("train.recompute={kind:full,num_layers:3}", "train.recompute.num_layers", "one of 1, 2, 4"),
        ("train.recompute={kind:selective,modules:[]}", "train.recompute.modules", "list"),
        ("train.recompute={kind:selective,modules:[attention]}", "train.recompute.modules.0", "must be one of core_attn"),
        ("train.recompute={kind:selective,modules:[moe,moe]}", "train.recompute.modules", "names a module twice"),
        ("train.recompute={kind:selective,modules:[moe_act,moe]}", "train.recompute.modules", "names moe_act beside moe"),
        (
            f"{DENSE} train.recompute={{kind:selective,modules:[mlp,moe]}}",
            "train.recompute.modules.1",
            "has no effect in a model of type qwen3",
        ),
        (f"{DENSE} train.recompute={{kind:selective,modules:[layernorm]}}", "train.recompute.modules.0", "norms of dense layers are fused"),
        ("train.recompute={kind:selective,modules:[mla_up_proj]}", "train.recompute.modules.0", "no multi-latent attention"),
        (f"{DEEPSEEK} train.mtp_loss=0.1 train.recompute={{kind:full,num_layers:2}}", "train.recompute.num_layers", "train.mtp_loss=0"),
        (
            f"{DEEPSEEK} +train.megatron.moe_shared_expert_overlap=true train.recompute={{kind:selective,modules:[shared_experts]}}",
            "train.megatron.moe_shared_expert_overlap",
            "does not go with shared_experts",
        ),
        ("train.destroy_groups=true", "train.destroy_groups", "needs train.offload=all"),
        ("train.destroy_groups=true train.offload=optimizer", "train.destroy_groups", "needs train.offload=all"),
        ("train.overlap_param_gather=true", "train.overlap_param_gather", "needs train.overlap_grad_reduce=true"),
        ("train.overlap_bucket_size=1000", "train.overlap_bucket_size", "needs train.overlap_grad_reduce=true"),
        (f"{MEMORY}.precision_aware=true", f"{MEMORY}.precision_aware", "needs train.dtype=bfloat16"),
        (f"{MEMORY}.exp_avg_dtype=bfloat16", f"{MEMORY}.exp_avg_dtype", "needs precision_aware=true"),
        (f"{MEMORY}.main_params_dtype=bfloat16", f"{MEMORY}.main_params_dtype", "must be one of float32, float16"),
        (f"{MEMORY}.cpu_fraction=1.5", f"{MEMORY}.cpu_fraction", "<= 1"),
        (
            f"train.dtype=bfloat16 {MEMORY}.precision_aware=true train.optimizer.muon={{}}",
            f"{MEMORY}.precision_aware",
            "train.optimizer.muon",
        ),
        ("train.optimizer.muon={momentum:1.0}", "train.optimizer.muon.momentum", "< 1"),
        (f"{MEMORY}.cpu_overlap=true", f"{MEMORY}.cpu_overlap", "needs cpu_fraction > 0"),
        (f"{MEMORY}.cpu_fraction=0.5", f"{MEMORY}.cpu_fraction", "needs precision_aware=true"),
        (
            f"train.dtype=bfloat16 {MEMORY}.precision_aware=true {MEMORY}.cpu_fraction=0.5 {MEMORY}.exp_avg_dtype=float16",
            f"{MEMORY}.exp_avg_dtype",
            "needs cpu_fraction=0",
        ),
        ("+train.megatron.recompute_granularity=full", "train.megatron.recompute_granularity", "set train.recompute.kind instead"),
        ("+train.megatron.recompute_modules=[moe]", "train.megatron.recompute_modules", "set train.recompute.modules instead"),
    ],
)
def test_what_cannot_work_is_refused_with_what_would(overrides, path, said):
    with pytest.raises(ConfigError) as caught:
        load(words(overrides))
    assert any(problem.path == path and said in str(problem) for problem in caught.value.problems), str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        "train.recompute={kind:full,num_layers:4}",
        "train.recompute={kind:full,method:block,num_layers:3}",
        f"{PIPELINE} train.recompute={{kind:full,num_layers:2}}",
        "train.recompute={kind:selective,modules:[core_attn,layernorm,moe_act]}",
        f"{DENSE} train.recompute={{kind:selective,modules:[mlp]}}",
        f"{DEEPSEEK} train.recompute={{kind:selective,modules:[mla_up_proj,shared_experts]}}",
        f"{DEEPSEEK} train.mtp_loss=0.1 train.recompute={{kind:full}}",
        "train.offload=all train.destroy_groups=true train.optimizer.muon={}",
        "train.overlap_grad_reduce=true train.overlap_param_gather=true train.overlap_bucket_size=1000",
        f"train.dtype=bfloat16 {MEMORY}.precision_aware=true {MEMORY}.exp_avg_dtype=bfloat16 {MEMORY}.exp_avg_sq_dtype=float16",
        f"train.dtype=bfloat16 {MEMORY}.precision_aware=true {MEMORY}.cpu_fraction=0.5 {MEMORY}.cpu_overlap=true",
        f"train.dtype=bfloat16 {MEMORY}.precision_aware=true {MEMORY}.cpu_fraction=0.5 train.offload=all",
    ],
)
def test_what_can_work_is_accepted(overrides):
    load(words(overrides))


def test_every_problem_is_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        load(words("train.destroy_groups=true train.overlap_param_gather=true train.recompute={kind:full,num_layers:9}"))
    assert len(caught.value.problems) == 3


def test_sections_become_their_types():
    train = load(words("train.recompute={kind:full,method:block,num_layers:2}")).train
    assert train.recompute == FullRecompute(method="block", num_layers=2)
    train = load(words("train.recompute={kind:selective,modules:[moe,core_attn]}")).train
    assert train.recompute == SelectiveRecompute(modules=("moe", "core_attn"))
