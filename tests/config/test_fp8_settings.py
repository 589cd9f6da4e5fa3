"""FP8 settings that cannot run are refused with the sizes that stand in the way; a GPU that cannot run a recipe likewise."""

import re
from dataclasses import replace

import pytest
from safetensors import safe_open

from moerl.check import load_checked
from moerl.config.derive.scratch_config import scratch_config
from moerl.config.load import load
from moerl.config.rules.facts import Facts
from moerl.config.rules.fp8_rules import fp8_problems, linear_sizes
from moerl.config.schema.layout import Layout
from moerl.config.schema.model_config import ScratchModel
from moerl.config.schema.train_config import FP8Config, OptimizerConfig, TrainConfig
from moerl.scratch_model import write_scratch_model
from moerl.train.megatron.fp8_fields import require
from moerl.types.errors import ConfigError

DEMO = "recipe=grpo-tiny-moe-1n2g-sync"
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_shared_experts": 1,
    "first_k_dense_replace": 3, "num_hidden_layers": 61, "num_attention_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 163840, "rope_theta": 10000,
    "rms_norm_eps": 1e-6, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
}  # fmt: skip
"""As published (config.json of DeepSeek-V3)."""
QWEN3_235B = {
    "model_type": "qwen3_moe", "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 94,
    "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "rms_norm_eps": 1e-6, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True,
}  # fmt: skip


def problems(*overrides):
    with pytest.raises(ConfigError) as caught:
        load_checked([DEMO, *overrides])
    return caught.value.problems


def train(recipe, layout, **options):
    fp8 = FP8Config(recipe=recipe, format="hybrid" if recipe == "delayed" else "e4m3")
    return TrainConfig(optimizer=OptimizerConfig(lr=1e-6), layout=layout, fp8=fp8, **options)


def test_fp8_needs_bfloat16():
    [problem] = problems("train.fp8={recipe:blockwise}")
    assert (problem.path, problem.value) == ("train.dtype", "float32")


def test_every_width_that_the_recipe_does_not_divide_is_named():
    found = problems("train.fp8={recipe:mxfp8}", "train.dtype=bfloat16", "model.scratch.ffn_size=48", "model.scratch.hidden_size=144")
    assert [problem.rule for problem in found] == [
        "needs hidden_size = 144 to be a multiple of 32",
        "needs moe_intermediate_size = 48 to be a multiple of 32",
    ]


def test_everything_that_is_wrong_is_said_at_once():
    """The demo has float32 and micro-batches of 4096 tokens."""
    found = problems(
        "train.fp8={recipe:delayed,first_layers_bf16:1}", "train.recompute={kind:full}", "model.scratch.hidden_size=136",
        "train.micro_batch_tokens=4104",
    )  # fmt: skip
    paths = ["train.dtype", "train.fp8.first_layers_bf16", "train.fp8.format", "train.fp8.recipe", "train.micro_batch_tokens"]
    assert sorted(problem.path for problem in found) == [*paths, "train.recompute.kind"]


def test_a_shard_must_be_whole_blocks_and_a_smaller_cut_is_proposed():
    found = problems("train.fp8={recipe:blockwise}", "train.dtype=bfloat16", "~train.layout", "train.layout={ranks:2,tp:2,etp:2}")
    for problem, (name, cut) in zip(found, [("num_attention_heads * head_dim", "tp"), ("moe_intermediate_size", "etp")], strict=True):
        assert problem.rule == f"needs {name} / {cut} = 128 / 2 to be a multiple of 128"
        assert problem.fix.startswith(f"train.layout.{cut}=1")
        assert "train.fp8.recipe=mxfp8" in problem.fix


@pytest.mark.parametrize(("size", "fix"), [(80, "tensorwise, or "), (96, "mxfp8, or train.fp8.recipe=tensorwise, or "), (72, None)])
def test_a_recipe_is_proposed_only_where_the_size_suits_it(size, fix):
    [problem] = problems("train.fp8={recipe:blockwise}", "train.dtype=bfloat16", f"model.scratch.hidden_size={size}")
    assert problem.fix == ("" if fix is None else f"train.fp8.recipe={fix}") + "train.fp8=null"


@pytest.mark.parametrize(
    ("recipe", "multiple", "wrong", "right"), [("blockwise", 128, 1000, 1024), ("mxfp8", 32, 1000, 1024), ("tensorwise", 16, 1000, 1008)]
)
def test_micro_batches_must_be_multiples_of_what_every_rank_needs(recipe, multiple, wrong, right):
    [problem] = problems(f"train.fp8={{recipe:{recipe}}}", "train.dtype=bfloat16", f"train.micro_batch_tokens={wrong}")
    assert (problem.path, problem.fix) == ("train.micro_batch_tokens", f"train.micro_batch_tokens={right}")
    assert right % multiple == 0


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise", "delayed", "mxfp8"])
@pytest.mark.parametrize("layout", [Layout(), Layout(ranks=8, tp=2, cp=4), Layout(ranks=3, cp=3), Layout(ranks=4, tp=4)])
def test_every_rank_gets_whole_blocks_of_tokens(recipe, layout):
    """After the cuts of context and of sequence parallelism; sequences are still cut into 2 * cp chunks."""
    chosen = train(recipe, layout)
    assert chosen.token_multiple % (layout.tp * layout.cp * chosen.fp8.alignment) == 0
    assert chosen.token_multiple % layout.token_multiple == 0


def test_layers_in_bfloat16_are_layers_of_the_model_and_not_all_of_them():
    [problem] = problems("train.fp8={recipe:blockwise,first_layers_bf16:5}", "train.dtype=bfloat16")
    assert "at most 4" in problem.rule
    for first in (2, 3, 4):
        [problem] = problems(f"train.fp8={{recipe:blockwise,first_layers_bf16:{first},last_layers_bf16:2}}", "train.dtype=bfloat16")
        assert problem.rule == "leaves no layer to FP8"


def test_the_recipes_of_a_layout_that_fits_are_accepted():
    for recipe, multiple in {"blockwise": 128, "tensorwise": 16, "mxfp8": 32, "delayed,format:hybrid": 16}.items():
        checked = load_checked([DEMO, f"train.fp8={{recipe:{recipe}}}", "train.dtype=bfloat16", "train.micro_batch_tokens=1024"])
        assert checked.train.token_multiple == multiple


def broken(trained, hf):
    return list(fp8_problems(replace(load([DEMO]), train=trained), Facts(hf=hf, shape=None)))


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise", "mxfp8"])
def test_the_published_models_fit_the_layouts_they_are_trained_with(recipe):
    """The down-projection of DeepSeek-V3's keys and values is 576 wide, four and a half blocks, and whole on every rank."""
    for tp in (1, 2, 4, 8):
        assert not broken(train(recipe, Layout(ranks=8, tp=tp), mtp_loss=0.1), DEEPSEEK_V3)
    for tp in (1, 2, 4):
        assert not broken(train(recipe, Layout(ranks=8, tp=tp)), QWEN3_235B)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_the_sizes_checked_are_those_of_the_models_own_weights(family, tmp_path):
    """Both sides of every matrix but those of embedding, output layer and router; queries, keys and values are one layer of Megatron's."""
    sizes = dict(hidden_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, ffn_size=20, num_experts=2)
    scratch = ScratchModel(family=family, mtp_layers=0, **sizes)
    write_scratch_model(scratch, 32, tmp_path / "model", seed=0)
    with safe_open(tmp_path / "model" / "model.safetensors", "np") as tensors:
        shapes = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    sides = set() if family == "deepseek_v3" else {(4 + 2 * 2) * 8}
    for name, shape in shapes.items():
        if len(shape) == 2 and not any(part in name for part in ("embed_tokens", "lm_head", "mlp.gate.weight")):
            sides |= {shape[1]} if family != "deepseek_v3" and re.search("[qkv]_proj", name) else set(shape)
    assert {linear.size for linear in linear_sizes(scratch_config(scratch, 32), trains_mtp=False)} == sides


def test_megatrons_own_names_are_refused():
    names = ("fp8", "fp8_param", "fp8_wgrad", "fp4", "moe_router_padding_for_fp8", "fp8_dot_product_attention")
    paths = {problem.path for problem in problems("train.megatron={" + ",".join(f"{name}:true" for name in names) + "}")}
    assert paths == {f"train.megatron.{name}" for name in names}


@pytest.mark.parametrize(
    ("recipe", "capability", "cuda", "said"),
    [
        ("blockwise", (8, 9), (12, 9), ["needs a GPU of compute capability 9.0 or higher; this one has 8.9"]),
        ("mxfp8", (9, 0), (12, 9), ["needs a GPU of compute capability 10.0 or higher; this one has 9.0"]),
        ("tensorwise", (8, 0), (12, 9), ["needs a GPU of compute capability 8.9 or higher; this one has 8.0"]),
        ("blockwise", (9, 0), (12, 8), ["needs CUDA 12.9 or newer; PyTorch was built with 12.8"]),
        ("mxfp8", (12, 0), (13, 0), ["needs a GPU of compute capability below 12.0; this one has 12.0"]),
        ("mxfp8", (9, 0), (12, 4), ["needs a GPU of compute capability 10.0", "needs CUDA 12.8 or newer"]),
    ],
)
def test_a_gpu_that_cannot_run_the_recipe_is_refused(recipe, capability, cuda, said):
    with pytest.raises(ConfigError) as caught:
        require(recipe, capability=capability, cuda=cuda)
    assert len(caught.value.problems) == len(said)
    for problem, words in zip(caught.value.problems, said, strict=True):
        assert problem.rule.startswith(words)


def test_the_gpus_the_recipes_were_made_for_are_accepted():
    accepted = {"blockwise": [(9, 0)], "mxfp8": [(10, 0), (10, 3)], "tensorwise": [(9, 0), (12, 0)], "delayed": [(8, 9)]}
    for recipe, capabilities in accepted.items():
        for capability in capabilities:
            require(recipe, capability=capability, cuda=(12, 9))
