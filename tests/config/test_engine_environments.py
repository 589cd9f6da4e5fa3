"""Versions of an engine's environment, read by its interpreter, beside this one's."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moerl.config.compose import compose
from moerl.config.derive.package_versions import versions_here, versions_there
from moerl.config.load import build
from moerl.config.rules.engine_rules import joins_by_nccl, nccl_problems
from moerl.config.rules.facts import facts_of

DEMO = "recipe=grpo-tiny-moe-1n2g-sync"


def environment(directory: Path, nccl: str) -> Path:
    """A folder with the package of NCCL and a PyTorch, as their wheels install them."""
    package = directory / f"nvidia_nccl_cu13-{nccl}.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nvidia-nccl-cu13\nVersion: {nccl}\n")
    (directory / "torch").mkdir()
    (directory / "torch" / "__init__.py").write_text("raise AssertionError('imported')\n")
    (directory / "torch" / "version.py").write_text("from typing import Optional\ncuda: Optional[str] = '13.0'\n")
    return directory


def interpreter(directory: Path, nccl: str) -> str:
    python = directory / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={environment(directory / "packages", nccl)} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


def test_versions_are_read_and_nothing_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    there = versions_there(interpreter(tmp_path, "2.30.7"), ["pydantic", "no-such-package"])
    assert (there["NCCL"], there["CUDA"]) == ("2.30.7", "13.0")
    assert there.keys() == {"python", "pydantic", "NCCL", "CUDA"}
    assert versions_here(["pydantic"])["pydantic"] == there["pydantic"]


def test_a_push_by_nccl_between_different_versions_of_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(environment(tmp_path / "own", "2.29.7"))
    config = build(compose([DEMO, "rollout.engine=sglang", "weights.transport=nccl"]))
    facts = facts_of(config.model)

    def found(nccl: str, run=config):
        (tmp_path / nccl).mkdir(exist_ok=True)
        python = interpreter(tmp_path / nccl, nccl) if not (tmp_path / nccl / "python").exists() else str(tmp_path / nccl / "python")
        return list(nccl_problems(replace(run, rollout=replace(run.rollout, python=python)), facts))

    (problem,) = found("2.30.7")
    assert (problem.path, problem.value) == ("weights.transport", "nccl")
    assert problem.rule == "cannot join NCCL 2.29.7 of this environment and NCCL 2.30.7 of sglang's"
    assert found("2.29.7") == []
    assert found("2.30.7", replace(config, weights=replace(config.weights, transport="disk"))) == []
    assert found("2.30.7", replace(config, placement=replace(config.placement, device="cpu"))) == []


@pytest.mark.parametrize(
    ("overrides", "joins"),
    [
        (["weights.transport=nccl"], True),
        (["placement={nodes:2,gpus_per_node:2}"], True),
        (["weights.transport=ipc"], False),
        (["weights.transport=nccl", "placement.mode=colocated"], False),
        (["weights.transport=nccl", "rollout.engine=hf"], False),
    ],
)
def test_trainer_and_servers_join_where_they_have_gpus_of_their_own_and_a_network_between(overrides: list[str], joins: bool):
    assert joins_by_nccl(build(compose([DEMO, "rollout.engine=sglang", *overrides]))) == joins
