"""Locks of GPU environments (locks/): trainer and engine fit each other, and a server has everything it imports. Whether the index has what
they name: tests/wheels/test_locks.py."""

import re
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import package_order
import pytest
from packaging.utils import canonicalize_name

import moerl
from moerl.doctor.checks.versions import is_supported, supported

ROOT = Path(moerl.__file__).resolve().parent.parent
ENGINES = ("sglang", "vllm")


def pins(file: str) -> dict[str, str]:
    """Package -> version, of a file of requirements in which every one is pinned."""
    found = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / file).read_text(), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


LOCKS = {name: pins(f"locks/{name}.txt") for engine in ENGINES for name in (engine, f"trainer-{engine}")}


@pytest.mark.parametrize("name", LOCKS)
def test_every_version_is_in_the_range_that_moerl_supports(name):
    named = {package: version for package, version in LOCKS[name].items() if package in supported()}
    assert len(named) > 5
    assert {package: version for package, version in named.items() if not is_supported(package, version)} == {}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_trainer_has_its_engines_pytorch_and_nccl(engine):
    """NCCL makes no communicator of ranks with different versions (init.cc), and a push may be one (weights.transport=nccl)."""
    trainer, server = LOCKS[f"trainer-{engine}"], LOCKS[engine]
    for package in ("torch", "nvidia-nccl-cu13"):
        assert trainer[package] == server[package], package


@pytest.mark.parametrize("engine", ENGINES)
def test_a_trainer_has_transformer_engine_with_its_core_and_the_newest_megatron_that_is_tested(engine):
    trainer = LOCKS[f"trainer-{engine}"]
    assert len({trainer[f"transformer-engine{part}"] for part in ("", "-torch", "-cu13")}) == 1
    assert trainer["megatron-core"] == pins("constraints-py312.txt")["megatron-core"]


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_are_those_that_are_tested_on_cpu(engine):
    tested = pins(f"scripts/engines/{engine}.txt")
    assert LOCKS[engine][engine] == tested.get(engine, tested.get(f"{engine}-cpu"))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_server_has_everything_it_imports(engine):
    """moerl is installed there without its requirements, and what an engine happens to bring changes with it."""
    waiting, seen, names = set((ROOT / "moerl/rollout/engines" / engine).glob("*.py")), {ROOT / "moerl/__init__.py"}, set()
    while waiting:
        seen.add(file := waiting.pop())
        for name in package_order.imported(file):
            if name.startswith("moerl."):
                waiting |= {file_of(name)} - seen
            else:
                names.add(name.split(".")[0])
    distributions = packages_distributions()
    needed = {canonicalize_name(distributions.get(name, [name])[0]) for name in names - {*sys.stdlib_module_names, "moerl"}}
    assert {"torch", "transformers", "xxhash"} <= needed
    assert sorted(needed - LOCKS[engine].keys()) == []


def file_of(name: str) -> Path:
    """File of the module that `name`, a module or something in one, belongs to."""
    path = ROOT.joinpath(*name.split("."))
    if path.with_suffix(".py").is_file():
        return path.with_suffix(".py")
    return path / "__init__.py" if path.is_dir() else file_of(name.rpartition(".")[0])
