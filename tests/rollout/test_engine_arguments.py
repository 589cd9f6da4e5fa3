"""rollout.engine_args against an engine's parser, and the rules of rollout.engine=vllm and sglang."""

import argparse
import dataclasses
import importlib.metadata
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from test_build_engines import config

from moerl.config.derive.model_shape import ModelShape
from moerl.config.rules import engine_rules
from moerl.config.rules.facts import Facts
from moerl.config.schema.rollout_config import ServerLayout
from moerl.rollout.engines.argument_check import QuietParser, argument_problems, version_problems
from moerl.rollout.engines.engine_arguments import FP8_BLOCKS, as_command_line, overrides
from moerl.rollout.engines.sglang import sglang_core, sglang_launch
from moerl.rollout.engines.vllm import vllm_core, vllm_launch


def parser():
    parser = QuietParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--tp-size", type=int)
    parser.add_argument("--enable-eplb", action="store_true")
    parser.add_argument("--eplb-config")
    parser.add_argument("--hosts", nargs="+")
    return parser


def problems(**arguments):
    return argument_problems(parser(), arguments, own={"model_path": "model.path"}, engine="SGLang")


def test_good_arguments_have_no_problem():
    assert problems(tp_size=2, enable_eplb=True, eplb_config={"n": 1}, hosts=["a", "b"]) == []


def test_an_unknown_name_gets_the_nearest():
    (found,) = problems(tp_sise=2)
    assert (found.path, found.fix) == ("rollout.engine_args.tp_sise", "rollout.engine_args.tp_size")


def test_a_name_that_moerl_sets_gets_the_field_to_set():
    (found,) = problems(model_path="x")
    assert "is set by moerl" in found.rule and found.fix == "model.path"


def test_another_name_of_an_argument_that_moerl_sets_is_refused_too():
    parser = QuietParser(add_help=False)
    parser.add_argument("--tp-size", "--tensor-parallel-size", type=int)
    (found,) = argument_problems(parser, {"tensor_parallel_size": 2}, own={"tp_size": "rollout.layout.gpus"}, engine="SGLang")
    assert "is set by moerl" in found.rule and found.fix == "rollout.layout.gpus"


@pytest.mark.parametrize(
    ("core", "name"),
    [
        (sglang_core, "pp_size"),
        (sglang_core, "moe_dp_size"),
        (sglang_core, "init_expert_location"),
        (vllm_core, "pipeline_parallel_size"),
        (vllm_core, "prefill_context_parallel_size"),
        (vllm_core, "data_parallel_size_local"),
        (vllm_core, "distributed_executor_backend"),
        (vllm_core, "expert_placement_strategy"),
    ],
)
def test_processes_that_the_layout_does_not_count_and_other_places_of_experts_are_refused(core, name):
    parser = QuietParser(add_help=False)
    parser.add_argument("--" + name.replace("_", "-"))
    (found,) = argument_problems(parser, {name: 2}, own=core.OWN_ARGUMENTS, engine="an engine")
    assert "is set by moerl" in found.rule


@pytest.mark.parametrize("name", ["enable_nvidia_megakernel", "enable_paged_experts", "weight_cache_mode"])
def test_arguments_with_which_sglang_takes_no_new_weights_are_refused(name):
    parser = QuietParser(add_help=False)
    parser.add_argument("--" + name.replace("_", "-"))
    (found,) = argument_problems(parser, {name: "daemon"}, own=sglang_core.OWN_ARGUMENTS, engine="SGLang")
    assert found.fix == "leave it out: pushes bring new weights"


def test_a_value_the_parser_refuses_is_explained_by_it():
    (found,) = problems(tp_size="two")
    assert "invalid int value: 'two'" in found.reason


def test_every_problem_is_reported():
    assert len(problems(tp_sise=2, model_path="x", tp_size="two")) == 3


def test_the_command_line_of_arguments():
    arguments = {"tp_size": 2, "enable_eplb": True, "off": False, "none": None, "eplb_config": {"n": 1}, "hosts": ["a", "b"]}
    line = as_command_line(arguments, parser())
    assert line == ["--tp-size", "2", "--enable-eplb", "--eplb-config", '{"n": 1}', "--hosts", "a", "b"]
    assert isinstance(parser().parse_args(["--model-path", "x", *line]), argparse.Namespace)


def test_false_switches_off_what_the_engine_has_on_by_default():
    both_ways = parser()
    both_ways.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    line = as_command_line({"enable_prefix_caching": False, "enable_eplb": False}, both_ways)
    assert line == ["--no-enable-prefix-caching"]


def test_a_version_outside_the_range_names_what_was_found_and_what_works():
    (found,) = version_problems("pytest", ["pytest"], ">=1,<2")
    assert "pytest>=1,<2" in found.rule and pytest.__version__ in found.rule
    assert version_problems("pytest", ["pytest"], ">=1") == []
    assert "has none" in version_problems("absent", ["no-such-package"], ">=1")[0].rule


SHAPE = ModelShape(model_type="qwen3_moe", num_layers=2, num_heads=4, num_kv_heads=2, max_positions=256, num_experts=8, expert_ffn_size=48)

NATIVE = ["sglang", "vllm"]
CORES = [("sglang", sglang_core, sglang_launch.SUPPORTED), ("vllm", vllm_core, vllm_launch.SUPPORTED)]


@pytest.mark.parametrize(("engine", "core", "supported"), CORES)
def test_an_installed_version_outside_the_range_is_one_problem(monkeypatch, engine, core, supported):
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.1.0")
    (found,) = core.find_problems({"no_such_argument": 1}, None)
    assert f"needs {engine}{supported}" in found.rule and "has 0.1.0" in found.rule
    assert found.fix == f"pip install '{engine}{supported}' there"


@pytest.mark.parametrize(("engine", "core", "supported"), CORES)
def test_the_range_is_that_of_the_extra_that_installs_it(engine, core, supported):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"][engine] == [f"{engine}{supported}"]


def rules(shape=SHAPE, hf=None, **changes):
    return list(engine_rules.engine_problems(config(**changes), Facts(hf=hf, shape=shape)))


@pytest.mark.parametrize("engine", NATIVE)
def test_a_missing_environment_gets_the_command_that_builds_it(monkeypatch, tmp_path, engine):
    monkeypatch.setattr(engine_rules, "_CHECKOUT", tmp_path)
    (found,) = rules(engine=engine)
    assert f"make engines ENGINES={engine}" in found.fix


@pytest.mark.parametrize(("engine", "model_type"), [("sglang", "gpt_oss"), ("vllm", "of_tomorrow")])
def test_models_and_settings_that_an_engine_is_not_tested_with_are_refused(monkeypatch, tmp_path, engine, model_type):
    monkeypatch.setattr(engine_rules, "_CHECKOUT", tmp_path)
    found = rules(dataclasses.replace(SHAPE, model_type=model_type), engine=engine, deterministic=True)
    assert [problem.path for problem in found] == ["deterministic", "rollout.engine", "rollout.python"]


@pytest.mark.parametrize("engine", NATIVE)
def test_an_environment_without_the_engine_is_refused(engine):
    (found,) = rules(None, engine=engine, python=sys.executable)
    assert found.path == "rollout.python" and "which has none" in found.rule


def test_an_environment_that_is_slow_to_answer_is_not_told_to_be_installed(monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    monkeypatch.setattr(engine_rules, "CHECK_SECONDS", 0.2)
    (found,) = rules(None, engine="vllm", python=str(python))
    assert found.rule == "did not answer within 0.2 s what moerl.rollout.engines.vllm takes"
    assert found.fix.startswith("the same command again")


def test_arguments_for_an_engine_that_has_none_are_refused():
    (found,) = rules(engine="hf", engine_args={"tp_size": 2})
    assert "has no effect" in found.rule


ARGUMENTS = {
    "sglang": {"tp_sise": 2, "dtype": "half", "stream_interval": "two"},
    "vllm": {"tensor_paralel_size": 2, "dtype": "half", "stream_interval": "two"},
}
NEAREST = {"sglang": "rollout.engine_args.tp_size", "vllm": "rollout.engine_args.tensor_parallel_size"}


@pytest.mark.engine
@pytest.mark.parametrize("engine", NATIVE)
def test_the_engines_own_parser_checks_arguments_and_all_problems_come_at_once(engine):
    found = {problem.path: problem for problem in rules(None, engine=engine, engine_args=ARGUMENTS[engine])}
    assert set(found) == {f"rollout.engine_args.{name}" for name in ARGUMENTS[engine]}
    own, refused = (found.pop(f"rollout.engine_args.{name}") for name in ("dtype", "stream_interval"))
    (misspelt,) = found.values()
    assert (misspelt.fix, own.fix) == (NEAREST[engine], "rollout.dtype")
    assert "two" in refused.reason


@pytest.mark.engine
@pytest.mark.skipif(torch.cuda.is_available(), reason="the sizes are those of kernels for CPU")
def test_a_model_in_sizes_without_cpu_kernels_is_refused():
    sizes = {"model_type": "deepseek_v3", "kv_lora_rank": 20, "qk_rope_head_dim": 8, "n_routed_experts": 8, "hidden_size": 80}
    latent, experts = rules(dataclasses.replace(SHAPE, model_type="deepseek_v3"), sizes, engine="vllm")
    assert (latent.value, latent.rule) == ("kv_lora_rank and qk_rope_head_dim = (20, 8)", "must be 512 and 64")
    assert (experts.value, experts.fix) == ("hidden_size = 80", "rollout.engine=hf, or a server on a GPU")


def test_engines_read_the_quantization_of_pushes_whatever_the_folder_has():
    plain = {"model_type": "glm4_moe", "num_hidden_layers": 1, "num_nextn_predict_layers": 1}
    quantized = plain | {"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.mlp.up_proj"]}}
    assert overrides(plain, ServerLayout()) == {}
    assert overrides(quantized, ServerLayout()) == {"quantization_config": None}
    kept = ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    for model in (plain, quantized):
        assert overrides(model, ServerLayout(weights="fp8"))["quantization_config"] == FP8_BLOCKS | {"modules_to_not_convert": kept}


@pytest.mark.parametrize(
    ("changed", "rules"),
    [
        ({}, []),
        ({"layer_types": ["sliding_attention", "full_attention"], "swiglu_limit": 7.0}, []),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["must be ['sliding_attention', 'full_attention']"]),
        ({"swiglu_limit": 0.5}, ["must be 7.0"]),
    ],
)
def test_a_gpt_oss_that_vllm_would_compute_otherwise_is_refused(changed, rules):
    assert [found.rule for found in vllm_core._model_problems({"model_type": "gpt_oss", "num_hidden_layers": 2, **changed})] == rules
