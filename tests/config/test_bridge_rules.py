"""train.bridge=mbridge is refused where mbridge is absent, of another version, or carries weights wrongly."""

import pytest

from moerl.config import bridge
from moerl.config.bridge import bridge_problems
from moerl.config.layout import Layout
from moerl.config.schema import OptimizerConfig, TrainConfig

QWEN3_MOE = {"model_type": "qwen3_moe", "num_experts": 8}


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(bridge, "_missing", lambda: None)


def rules(hf=QWEN3_MOE, **options):
    train = TrainConfig(optimizer=OptimizerConfig(lr=1e-6), bridge="mbridge", **options)
    return [found.rule for found in bridge_problems(train, hf)]


def test_an_absent_or_another_mbridge_is_named_with_what_to_install(monkeypatch):
    def absent(name):
        raise bridge.PackageNotFoundError(name)

    for version, reason in ((absent, "is not installed"), (lambda name: "0.14.0", "version 0.14.0 is installed")):
        monkeypatch.setattr(bridge, "version", version)
        monkeypatch.setattr(bridge.importlib.util, "find_spec", lambda name: object())
        [problem] = bridge_problems(TrainConfig(optimizer=OptimizerConfig(lr=1e-6), bridge="mbridge"), QWEN3_MOE)
        assert (problem.path, problem.value, problem.rule) == ("train.bridge", "mbridge", "needs mbridge 0.15.1")
        assert reason in problem.reason
        assert "pip install 'moerl[mbridge]'" in problem.fix


def test_what_mbridge_carries_is_accepted(installed):
    assert rules() == []
    assert rules({"model_type": "llama"}, layout=Layout(ranks=2, tp=2)) == []
    assert rules(layout=Layout(ranks=2, tp=2, ep=2)) == []


def test_what_mbridge_would_carry_wrongly_is_refused(installed):
    assert rules({"model_type": "glm4_moe"}) == ["must be native for this model"]
    assert rules(mtp_loss=0.1) == ["must be native while train.mtp_loss > 0"]
    assert rules(layout=Layout(ranks=2, tp=2)) == ["needs train.layout.etp=train.layout.tp when ep=1"]
