"""A train.bridge is refused where its package is absent, of another version, or carries weights wrongly."""

from dataclasses import replace

import pytest

from moerl.config.load import load
from moerl.config.rules import model_rules
from moerl.config.rules.facts import Facts
from moerl.config.rules.model_rules import bridge_problems
from moerl.config.schema.layout import Layout
from moerl.config.schema.train_config import OptimizerConfig, TrainConfig

DEMO = load(["recipe=grpo-tiny-moe-1n2g-sync"])
QWEN3_MOE = {"model_type": "qwen3_moe", "num_experts": 8}


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(model_rules, "missing", lambda package: None)


def problems(hf=QWEN3_MOE, name="mbridge", **options):
    train = TrainConfig(optimizer=OptimizerConfig(lr=1e-6), bridge=name, **options)
    return list(bridge_problems(replace(DEMO, train=train), Facts(hf=hf, shape=None)))


def rules(*args, **options):
    return [found.rule for found in problems(*args, **options)]


@pytest.mark.parametrize(
    ("name", "rule", "install"),
    [
        ("mbridge", "needs mbridge 0.15.1", "pip install 'moerl[mbridge]'"),
        ("megatron_bridge", "needs megatron-bridge 0.3.1", "pip install --no-deps megatron-bridge==0.3.1 triton"),
    ],
)
def test_an_absent_or_another_package_is_named_with_what_to_install(name, rule, install, monkeypatch):
    def absent(name):
        raise model_rules.PackageNotFoundError(name)

    for version, reason in ((absent, "is not installed"), (lambda name: "0.14.0", "version 0.14.0 is installed")):
        monkeypatch.setattr(model_rules, "version", version)
        monkeypatch.setattr(model_rules.importlib.util, "find_spec", lambda name: object())
        [problem] = problems(name=name)
        assert (problem.path, problem.value, problem.rule) == ("train.bridge", name, rule)
        assert reason in problem.reason
        assert install in problem.fix


def test_what_a_package_imports_and_moerl_does_not_require_is_asked_for(monkeypatch):
    monkeypatch.setattr(model_rules, "version", lambda name: "0.3.1")
    monkeypatch.setattr(model_rules.importlib.util, "find_spec", lambda name: None if name == "triton" else object())
    [problem] = problems(name="megatron_bridge")
    assert problem.reason == "the module triton, which megatron-bridge needs, cannot be imported here"


def test_what_a_package_carries_is_accepted(installed):
    assert rules() == []
    assert rules({"model_type": "llama"}, layout=Layout(ranks=2, tp=2)) == []
    assert rules(layout=Layout(ranks=2, tp=2, ep=2)) == []
    assert rules({"model_type": "glm4_moe", "n_routed_experts": 8}, "megatron_bridge") == []
    assert rules(QWEN3_MOE, "megatron_bridge", layout=Layout(ranks=2, tp=2)) == []


def test_what_a_package_would_carry_wrongly_is_refused(installed):
    assert rules({"model_type": "glm4_moe"}) == ["must be native for this model"]
    assert rules({"model_type": "mixtral"}, "megatron_bridge") == ["must be native for this model"]
    for name in ("mbridge", "megatron_bridge"):
        assert rules(name=name, mtp_loss=0.1) == ["must be native while train.mtp_loss > 0"]
    in_fp8 = QWEN3_MOE | {"quantization_config": {"quant_method": "fp8"}}
    assert rules(in_fp8, layout=Layout(ranks=2, tp=2, ep=2)) == ["must be native for weights in FP8 (quantization_config)"]
    assert rules(in_fp8, "megatron_bridge") == []
    assert rules(layout=Layout(ranks=2, tp=2)) == ["needs train.layout.etp=train.layout.tp when ep=1"]
