"""rollout.layout: each rule broken once, what can be checked without an engine, what does not start yet."""

import functools
import json
import re
from dataclasses import replace

import pytest
import yaml
from typer.testing import CliRunner

from moerl.__main__ import app
from moerl.check import load_checked
from moerl.config.derive.model_configs import model_config, published_config
from moerl.config.derive.model_shape import shape_of_config
from moerl.config.rules import engine_rules
from moerl.config.rules.facts import Facts, facts_of
from moerl.config.rules.fp8_rules import server_fp8_problems
from moerl.config.rules.server_layout_rules import layout_problems, start_problems
from moerl.config.schema.rollout_config import RolloutConfig, ServerLayout
from moerl.types.errors import ConfigError

DEEPSEEK, QWEN, GLM = "grpo-deepseek-v3-32n8g-sync", "grpo-qwen3-235b-16n8g-sync", "grpo-glm-4.5-8n8g-sync"
DEMO = "grpo-tiny-moe-1n2g-sync"


def problems(recipe, *overrides, starts=False):
    with pytest.raises(ConfigError) as caught:
        load_checked([f"recipe={recipe}", *overrides], starts=starts)
    return caught.value.problems


def test_by_default_a_server_is_one_process_on_one_node():
    layout = RolloutConfig(max_response_tokens=1).layout
    assert (layout.gpus, layout.tp, layout.dp, layout.ep, layout.expert_tp, layout.nodes) == (1, 1, 1, 1, 1, 1)
    assert not layout.uses_deepep


def test_what_follows_from_the_sizes():
    layout = ServerLayout(gpus=32, dp=4, ep=16, gpus_per_node=8)
    assert (layout.tp, layout.expert_tp, layout.nodes) == (8, 2, 4)


@functools.cache
def loaded(recipe):
    return load_checked([f"recipe={recipe}"])


def broken(recipe, layout, **rollout):
    """Rules that the recipe breaks with another layout."""
    config = loaded(recipe)
    changed = replace(config, rollout=replace(config.rollout, layout=layout, **rollout))
    return list(layout_problems(changed, facts_of(config.model)))


@pytest.mark.parametrize(
    ("recipe", "refused"),
    [
        (DEEPSEEK, {"model.path"}),
        (GLM, {"model.path"}),
        ("grpo-kimi-k2-32n8g-sync", {"model.path"}),
    ],
)
def test_a_named_model_can_be_checked_and_the_check_says_what_a_start_refuses(recipe, refused):
    assert {found.path for found in problems(recipe, starts=True)} == refused
    shown = CliRunner().invoke(app, ["check", f"recipe={recipe}"])
    assert shown.exit_code == 0 and yaml.safe_load(shown.output)["name"] == recipe
    (heading,) = [line for line in shown.output.splitlines() if line.startswith("# cannot start")]
    listed = {line.split()[1] for line in shown.output.partition(heading)[2].splitlines() if re.match(r"#   \w+\.\S+ = ", line)}
    assert listed == refused


@pytest.mark.parametrize("gpus", [4, 12, 48])
def test_sizes_that_do_not_divide_are_said_before_what_would_follow_from_them(gpus):
    assert {found.path for found in problems(DEEPSEEK, f"rollout.layout.gpus={gpus}")} >= {"rollout.layout.ep"}


@pytest.mark.parametrize(
    ("recipe", "layout", "path", "said"),
    [
        (QWEN, ServerLayout(gpus=36, dp=9, ep=4), "gpus", "must divide gpus_per_node=8, or be a multiple of it"),
        (QWEN, ServerLayout(gpus=32, dp=5, ep=32), "dp", "must divide gpus=32"),
        (QWEN, ServerLayout(gpus=32, dp=4, ep=5), "ep", "must divide gpus=32"),
        (QWEN, ServerLayout(gpus=32, dp=4, ep=8, all_to_all="deepep"), "all_to_all", "needs ep=gpus=32"),
        (QWEN, ServerLayout(all_to_all="deepep"), "all_to_all", "of more than one GPU"),
        (GLM, ServerLayout(gpus=40, dp=5, ep=40, all_to_all="deepep"), "all_to_all", "2, 3, 4, 6, 8, 12, 16, 18 or 20 nodes of 8"),
        (QWEN, ServerLayout(gpus=8, redundant_experts=8), "redundant_experts", "needs ep > 1"),
        (QWEN, ServerLayout(gpus=32, dp=4, ep=32, redundant_experts=8), "ep", "128 experts and redundant_experts=8 together"),
        (QWEN, ServerLayout(gpus=32, dp=4, ep=32, mtp_tokens=1), "mtp_tokens", "must be 0 for this model"),
        (QWEN, ServerLayout(gpus=128, ep=128), "dp", "must leave a divisor of the model's 64 attention heads"),
        (QWEN, ServerLayout(gpus=6, gpus_per_node=6, dp=3, ep=3), "ep", "must divide the model's 128 experts"),
        (GLM, ServerLayout(gpus=96, dp=8, gpus_per_node=12, ep=32), "dp", "a divisor or a multiple of the model's 8 key/value heads"),
        (GLM, ServerLayout(gpus=32, dp=4, ep=2, weights="fp8"), "weights", "needs parts of an expert that are multiples of 128"),
        (DEEPSEEK, ServerLayout(gpus=32, ep=32, weights="fp8"), "weights", "would hold 576 of intermediate_size"),
        (DEEPSEEK, ServerLayout(gpus=32, ep=32, weights="fp8"), "weights", "would hold 64 of the shared experts"),
        (GLM, ServerLayout(gpus=1024, dp=128), "ep", "must leave a divisor of the experts' inner size 1536"),
    ],
)
def test_a_layout_that_breaks_a_rule_is_refused(recipe, layout, path, said):
    found = broken(recipe, layout)
    assert [each.path for each in found if said in f"{each.rule} {each.reason}"] == [f"rollout.layout.{path}"], found


@pytest.mark.parametrize(
    ("layout", "field", "fix"),
    [
        (ServerLayout(gpus=12, gpus_per_node=12), "dp", "dp=3"),
        (ServerLayout(gpus=96, dp=8, gpus_per_node=12, ep=32), "dp", "dp=12"),
        (ServerLayout(gpus=1024, dp=128), "ep", "ep=2 or ep=4 or ep=8 or ep=16 or ep=32"),
        (ServerLayout(gpus=4096, dp=512), "ep", "ep=8 or ep=16 or ep=32"),
        (ServerLayout(gpus=2**15, dp=2**12), "ep", "a smaller gpus"),
    ],
)
def test_what_is_proposed_instead_of_a_size_keeps_the_rule(layout, field, fix):
    (found,) = [each for each in broken(GLM, layout, max_running=2**12) if " must leave" in f" {each.rule}"]
    assert (found.path, found.fix) == (f"rollout.layout.{field}", fix)
    for each in re.findall(rf"{field}=(\d+)", fix):
        changed = broken(GLM, replace(layout, **{field: int(each)}), max_running=2**12)
        assert not [other for other in changed if "must leave" in other.rule or "must divide" in other.rule]


def test_sizes_outside_their_range_are_refused_by_the_schema():
    (found,) = problems(DEEPSEEK, "rollout.layout.memory_fraction=1.5")
    assert found.path == "rollout.layout.memory_fraction"


def test_all_problems_of_a_layout_come_together():
    found = problems(QWEN, "rollout.layout.gpus=36", "rollout.layout.dp=5", "rollout.layout.mtp_tokens=1", "rollout.max_running=4")
    expected = {"layout.gpus", "layout.dp", "layout.ep", "layout.mtp_tokens", "max_running"}
    assert {each.path.removeprefix("rollout.") for each in found} >= expected


def test_more_tokens_than_the_kernels_for_latency_send_are_refused_with_the_most():
    layout = loaded(DEEPSEEK).rollout.layout
    (found,) = broken(DEEPSEEK, layout, max_running=8200)
    assert (found.path, found.fix.split(",")[0]) == ("rollout.max_running", "rollout.max_running=8192")
    drafting = loaded(GLM).rollout.layout
    (found,) = broken(GLM, drafting, max_running=1025)
    assert "at most 1024 for all_to_all=deepep, dp=4 and mtp_tokens=3" in found.rule
    assert found.fix == "rollout.max_running=1024, a larger rollout.layout.dp, or rollout.layout.all_to_all=deepep_normal"
    assert broken(GLM, replace(drafting, all_to_all="deepep_normal"), max_running=1025) == []


def test_tokens_that_deepep_cannot_send_are_refused():
    (found,) = broken(DEEPSEEK, loaded(DEEPSEEK).rollout.layout, dtype="float32")
    assert (found.path, found.value) == ("rollout.dtype", "float32") and "all_to_all=deepep" in found.rule


def test_a_dense_model_has_no_experts_to_spread():
    shape = replace(shape_of_config(model_config(loaded(QWEN).model)), num_experts=None, expert_ffn_size=0)
    config = loaded(QWEN)
    changed = replace(config, rollout=replace(config.rollout, layout=ServerLayout(gpus=2, dp=2, ep=2)))
    assert [each.path for each in layout_problems(changed, Facts(hf=None, shape=shape))] == ["rollout.layout.ep", "rollout.layout.dp"]


def test_a_layout_for_an_engine_of_one_process_is_refused():
    (found,) = problems(DEMO, "rollout.layout={gpus:2}")
    assert found.path == "rollout.layout" and "one process" in found.reason


def test_a_model_with_several_drafting_layers_is_refused_for_sglang():
    config = loaded(GLM)
    shape = replace(shape_of_config(model_config(config.model)), num_mtp_layers=2)
    assert [(each.path, each.fix) for each in layout_problems(config, Facts(hf=None, shape=shape))] == [
        ("rollout.layout.mtp_tokens", "mtp_tokens=0, or rollout.engine=vllm")
    ]


@pytest.mark.parametrize(
    ("model_type", "layout", "paths"),
    [
        ("mixtral", ServerLayout(gpus=8, dp=2), ["dp"]),
        ("mixtral", ServerLayout(gpus=8, ep=8), []),
        ("olmoe", ServerLayout(gpus=2), ["gpus"]),
        ("olmoe", ServerLayout(gpus=2, dp=2), ["dp"]),
        ("qwen3_moe", ServerLayout(gpus=8, dp=2), []),
    ],
)
def test_attention_that_sglang_cuts_over_all_gpus_is_in_one_group(model_type, layout, paths):
    config = loaded(QWEN)
    shape = replace(shape_of_config(model_config(config.model)), model_type=model_type)
    changed = replace(config, rollout=replace(config.rollout, layout=layout))
    assert [each.path for each in layout_problems(changed, Facts(hf=None, shape=shape))] == [f"rollout.layout.{path}" for path in paths]


@pytest.mark.parametrize(("engine", "refused"), [("sglang", True), ("vllm", False)])
def test_a_width_that_the_kernels_for_latency_are_not_compiled_for_is_refused_where_none_pads_it(engine, refused):
    config = loaded(QWEN)
    layout = ServerLayout(gpus=8, dp=2, ep=8, all_to_all="deepep_low_latency")
    changed = replace(config, rollout=replace(config.rollout, engine=engine, layout=layout, max_running=64, prefill_chunk=256))
    hf = {**model_config(config.model), "hidden_size": 3584}
    found = list(layout_problems(changed, Facts(hf=hf, shape=shape_of_config(hf))))
    assert [each.path for each in found if "3584" in each.rule] == ["rollout.layout.all_to_all"] * refused


def test_routes_are_not_replayed_where_the_engine_may_report_others():
    config = loaded(GLM)
    layout = ServerLayout(gpus=32, dp=4, ep=32, mtp_tokens=1, redundant_experts=32)
    rollout = replace(config.rollout, layout=layout, max_running=1024, prefill_chunk=511)
    changed = replace(config, rollout=rollout, train=replace(config.train, router_replay="rollout"))
    assert [each.path for each in layout_problems(changed, Facts(hf=None, shape=None))] == [
        "rollout.prefill_chunk",
        "rollout.layout.redundant_experts",
    ]


# -- vLLM ----------------------------------------------------------------------------------------------------------


def of_vllm(layout, **rollout):
    return broken(GLM, layout, **{"engine": "vllm", "max_running": 512, "prefill_chunk": 256} | rollout)


@pytest.mark.parametrize(
    ("layout", "path", "said"),
    [
        (ServerLayout(gpus=32, dp=4, ep=8), "ep", "must be 1 or gpus=32"),
        (ServerLayout(gpus=32, dp=4, ep=32, all_to_all="deepep"), "all_to_all", "is not offered by vllm"),
        (ServerLayout(gpus=32, ep=32, all_to_all="deepep_normal"), "all_to_all", "needs dp > 1"),
        (ServerLayout(gpus=8, gpus_per_node=4, dp=2, ep=8, all_to_all="deepep_normal"), "all_to_all", "needs nodes of 8 GPUs"),
        (ServerLayout(gpus=96, gpus_per_node=12, dp=12), "dp", "must leave groups that fill nodes"),
    ],
)
def test_what_vllm_lacks_is_refused(layout, path, said):
    (found,) = of_vllm(layout)
    assert found.path == f"rollout.layout.{path}" and said in found.rule


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_prompts_go_through_the_kernels_for_latency_too(engine):
    layout = ServerLayout(gpus=32, dp=4, ep=32, all_to_all="deepep_low_latency")
    assert broken(GLM, layout, engine=engine, max_running=512, prefill_chunk=256) == []
    (found,) = broken(GLM, layout, engine=engine, max_running=512, prefill_chunk=4096)
    assert found.path == "rollout.prefill_chunk" and ", or rollout.layout.all_to_all=deepep" in found.fix


# -- checking and starting ---------------------------------------------------------------------------------------------


@pytest.fixture
def downloaded(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(published_config("qwen3-235b-a22b")))
    for name in ("tokenizer.json", "model.safetensors"):
        (directory / name).touch()
    return f"model.path={directory}"


def test_a_recipe_whose_model_is_only_named_needs_no_environment_of_its_engine(monkeypatch, tmp_path, downloaded):
    monkeypatch.setattr(engine_rules, "_CHECKOUT", tmp_path)
    load_checked([f"recipe={QWEN}"])
    (found,) = problems(QWEN, downloaded)
    assert found.path == "rollout.python" and "make engines ENGINES=sglang" in found.fix


def test_what_cannot_be_started_yet_is_said_at_the_start_only(monkeypatch, tmp_path, downloaded):
    monkeypatch.setattr(engine_rules, "_found_there", lambda *arguments: ())
    python = tmp_path / "python"
    python.touch()
    given = [downloaded, f"rollout.python={python}", "rollout.layout.redundant_experts=32"]
    config = load_checked([f"recipe={QWEN}", *given])
    found = problems(QWEN, *given, starts=True)
    assert [each.path for each in found] == ["rollout.layout.redundant_experts"]
    vllm = replace(config, rollout=replace(config.rollout, engine="vllm", layout=replace(config.rollout.layout, redundant_experts=None)))
    assert list(start_problems(vllm, facts_of(config.model))) == []
    found = list(start_problems(replace(vllm, placement=replace(vllm.placement, gpu=None)), facts_of(config.model)))
    assert [each.path for each in found] == ["rollout.layout.dp", "rollout.layout.ep"]
    assert "build for CPU runs no experts" in found[0].reason


def test_a_server_of_vllm_is_one_gpu_for_experts_with_biases():
    config = load_checked([f"recipe={QWEN}"])
    facts = facts_of(config.model)
    biased = replace(facts, shape=replace(facts.shape, has_biased_experts=True))

    def refused(gpus):
        return list(start_problems(replace(config, rollout=replace(config.rollout, engine="vllm", layout=ServerLayout(gpus=gpus))), biased))

    (found,) = refused(2)
    assert found.path == "rollout.layout.gpus" and "zeros" in found.reason
    assert refused(1) == []


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_tensor_parallel_server_over_several_nodes_can_be_started_with_both_engines(engine):
    config = load_checked([f"recipe={QWEN}"])
    layout = ServerLayout(gpus=16, gpus_per_node=8)
    assert (
        list(start_problems(replace(config, rollout=replace(config.rollout, engine=engine, layout=layout)), facts_of(config.model))) == []
    )


def test_of_a_layout_the_hf_engine_takes_the_weights_format_only():
    (found,) = broken(QWEN, ServerLayout(gpus=2, ep=2, weights="fp8"), engine="hf")
    assert found.path == "rollout.layout" and "only weights can be chosen" in found.reason
    assert broken(QWEN, ServerLayout(weights="fp8"), engine="hf") == []


FP8 = ServerLayout(gpus=16, dp=8, ep=16, all_to_all="deepep", weights="fp8")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"quantization_config": {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.norm"]}}, ""),
        (
            {"quantization_config": {"modules_to_not_convert": ["lm_head", "model.layers.0.self_attn.o_proj"]}},
            "model.layers.0.self_attn.o_proj",
        ),
        ({"q_lora_rank": 1500}, "would hold 1500 of q_lora_rank"),
        ({"moe_intermediate_size": 2000}, "would hold 2000 of an expert"),
    ],
)
def test_servers_take_fp8_of_whole_blocks_and_of_what_published_folders_quantize(changes, said):
    config = loaded(DEEPSEEK)
    config = replace(config, rollout=replace(config.rollout, layout=FP8))
    found = list(server_fp8_problems(config, replace(facts_of(config.model), hf=model_config(config.model) | changes)))
    assert [found[0].path, said in found[0].reason] == ["rollout.layout.weights", True] if said else found == []


def test_scales_are_powers_of_two_where_the_kernels_of_the_servers_gpu_take_no_others():
    config, forms = loaded(DEEPSEEK), {}
    for engine in ("sglang", "vllm", "hf"):
        for gpu in (None, 9.0, 10.0):
            placed = replace(config.placement, gpu=None if gpu is None else replace(config.placement.gpu, capability=gpu))
            run = replace(config, rollout=replace(config.rollout, engine=engine, layout=FP8), placement=placed)
            forms[engine, gpu] = run.fp8_scales
    in_powers = {("sglang", 10.0), ("vllm", 9.0), ("vllm", 10.0)}
    assert forms == {key: "ue8m0" if key in in_powers else "float32" for key in forms}
    assert config.fp8_scales is None


def test_fp8_on_gpus_computes_in_16_bits():
    config = loaded(DEEPSEEK)
    config = replace(config, rollout=replace(config.rollout, layout=FP8, dtype="float32"))
    (found,) = server_fp8_problems(config, facts_of(config.model))
    assert found.path == "rollout.dtype" and "bfloat16" in found.fix
