"""Of an architecture without a family, a user learns which of the packages of train.bridge know it."""

import sys

import pytest

from moerl.config.rules.model_rules import missing
from moerl.models import opened_families
from moerl.models.bridge_packages import BRIDGES, registered
from moerl.models.find_family import explain_unknown

MBRIDGE = '@register_model("mimo")\nclass A(Bridge): ...\n\n@register_model(["internvl_chat", "gemma3"])\nclass B(Bridge): ...\n'
MEGATRON_BRIDGE = (
    "@MegatronModelBridge.register_bridge(source=OlmoeForCausalLM, target=GPTModel)\nclass C(MegatronModelBridge): ...\n\n"
    '@MegatronModelBridge.register_bridge(source="DeepseekV2ForCausalLM", target=GPTModel)\nclass D(MegatronModelBridge): ...\n'
)


@pytest.fixture
def only(tmp_path, monkeypatch):
    """Leaves only the packages it is called with, as pip would install them."""

    def install(**sources):
        for name, source in sources.items():
            (tmp_path / f"{name}_models.py").write_text(source)
            info = tmp_path / f"{name}-9.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {BRIDGES[name].name}\nVersion: 9.0\n")
            (info / "RECORD").write_text(f"{name}_models.py,,\n{name}-9.0.dist-info/METADATA,,\n")
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
        registered.cache_clear()

    yield install
    registered.cache_clear()


def reason(**hf):
    return explain_unknown(hf).reason


def test_an_absent_package_is_named_with_how_to_install_it(only):
    only()
    said = reason(model_type="mimo")
    for package in BRIDGES.values():
        assert f"{package.name}, which may know it, is not installed here: {package.install}" in said


def test_a_package_that_knows_the_architecture_is_named(only, monkeypatch):
    only(mbridge=MBRIDGE, megatron_bridge=MEGATRON_BRIDGE)
    monkeypatch.setattr(opened_families, "_prove", lambda text: opened_families.Opened(refusal="it is a test's"))
    monkeypatch.setattr(opened_families, "keep_file", lambda *_: None)
    for kind in ("mimo", "gemma3", "internvl_chat"):
        assert "mbridge 9.0 knows it; megatron-bridge 9.0 does not know it" in reason(model_type=kind)
    for architecture in ("OlmoeForCausalLM", "DeepseekV2ForCausalLM"):
        said = reason(model_type="something", architectures=[architecture])
        assert "mbridge 9.0 does not know it; megatron-bridge 9.0 knows it" in said
        assert said.endswith("what it declares moerl does not take: it is a test's")


def test_the_nearest_family_and_why_megatron_cannot_are_still_said(only):
    only(megatron_bridge="@register_bridge(source='Qwen3_5MoeForCausalLM')\nclass E: ...\n")
    said = reason(model_type="qwen3_5_moe", architectures=["Qwen3_5MoeForCausalLM"])
    assert "of a model of images too" in said
    assert "megatron-bridge 9.0 knows it" in said
    assert "the nearest is qwen3_moe" in reason(model_type="qwen4_moe")


@pytest.mark.parametrize(
    ("name", "known"), [("mbridge", {"mimo", "glm4_moe"}), ("megatron_bridge", {"OlmoeForCausalLM", "Glm4MoeForCausalLM"})]
)
def test_the_registry_of_the_installed_version_is_read(name, known):
    if fault := missing(BRIDGES[name]):
        pytest.skip(fault)
    assert known <= registered(BRIDGES[name].name)
    assert all(value.replace("_", "").isalnum() for value in registered(BRIDGES[name].name))
