"""rollout.engine_args against an engine's parser, and the rules of rollout.engine=sglang."""

import argparse
import dataclasses
import sys

import pytest
from test_build_engines import config

from moerl.config import engines
from moerl.config.model_shape import ModelShape
from moerl.rollout.engines.arguments import QuietParser, argument_problems, as_command_line, version_problems


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


def test_a_value_the_parser_refuses_is_explained_by_it():
    (found,) = problems(tp_size="two")
    assert "invalid int value: 'two'" in found.reason


def test_every_problem_is_reported():
    assert len(problems(tp_sise=2, model_path="x", tp_size="two")) == 3


def test_the_command_line_of_arguments():
    line = as_command_line({"tp_size": 2, "enable_eplb": True, "off": False, "none": None, "eplb_config": {"n": 1}, "hosts": ["a", "b"]})
    assert line == ["--tp-size", "2", "--enable-eplb", "--eplb-config", '{"n": 1}', "--hosts", "a", "b"]
    assert isinstance(parser().parse_args(["--model-path", "x", *line]), argparse.Namespace)


def test_a_version_outside_the_range_names_what_was_found_and_what_works():
    (found,) = version_problems("pytest", ["pytest"], ">=1,<2")
    assert "pytest>=1,<2" in found.rule and pytest.__version__ in found.rule
    assert version_problems("pytest", ["pytest"], ">=1") == []
    assert "has none" in version_problems("absent", ["no-such-package"], ">=1")[0].rule


SHAPE = ModelShape(model_type="qwen3_moe", num_layers=2, num_heads=4, num_kv_heads=2, max_positions=256, num_experts=8, expert_ffn_size=48)


def rules(shape=SHAPE, **changes):
    return list(engines.engine_problems(config(**changes), shape))


def test_a_missing_environment_gets_the_command_that_builds_it(monkeypatch, tmp_path):
    monkeypatch.setattr(engines, "_CHECKOUT", tmp_path)
    (found,) = rules(engine="sglang")
    assert "make engines ENGINES=sglang" in found.fix


def test_models_and_settings_that_sglang_is_not_tested_with_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(engines, "_CHECKOUT", tmp_path)
    found = rules(dataclasses.replace(SHAPE, model_type="deepseek_v3"), engine="sglang", deterministic=True)
    assert [problem.path for problem in found] == ["deterministic", "rollout.engine", "rollout.python"]


def test_an_environment_without_the_engine_is_refused():
    (found,) = rules(engine="sglang", python=sys.executable)
    assert found.path == "rollout.python" and "which has none" in found.rule


def test_arguments_for_an_engine_that_has_none_are_refused():
    (found,) = rules(engine="hf", engine_args={"tp_size": 2})
    assert "has no effect" in found.rule
