"""Locks of GPU environments (locks/): trainer and engine fit each other, and a server has everything it imports. Whether the index has what
they name: tests/wheels/test_lock_files.py."""

import os
import re
import shutil
import subprocess
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


def test_an_environment_for_gpus_without_transformer_engine_is_an_error(tmp_path):
    """It is there, made from the same lock, and its interpreter is this one, which has none."""
    files = ["scripts/gpu.sh", "scripts/from_lock.sh", "locks/trainer-sglang.txt", "pyproject.toml"]
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    tools = {"nvidia-smi": "", "nvcc": "", "python3.12": 'test "$1" != -V || echo Python 3.12.0', "python": f'exec {sys.executable} "$@"'}
    for name, does in tools.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / ".venv-gpu" / "bin").mkdir(parents=True)
    (tmp_path / "python").rename(tmp_path / ".venv-gpu" / "bin" / "python")
    made_from = "".join((tmp_path / file).read_text() for file in (files[2], files[3], files[0], files[1]))
    (tmp_path / ".venv-gpu" / ".installed").write_text(f"{tmp_path}\nPython 3.12.0\n{made_from}")
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(["bash", tmp_path / "scripts" / "gpu.sh"], capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert "No module named 'transformer_engine'" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("gpu: Transformer Engine cannot be used (above)")


@pytest.mark.skipif(sys.version_info[:2] != (3, 11) or shutil.which("nvidia-smi") is not None, reason="of an environment for CPU")
def test_an_engine_whose_packages_could_not_be_installed_has_no_environment(tmp_path):
    environment = os.environ | {
        "XDG_CACHE_HOME": str(tmp_path),
        "PYTHON": sys.executable,
        "ENGINES": "vllm",
        "TORCH": str(tmp_path / "no.whl"),
    }
    done = subprocess.run(["bash", ROOT / "scripts" / "engines.sh"], capture_output=True, text=True, env=environment)
    assert done.returncode != 0
    assert "no.whl" in done.stderr and "done" not in done.stderr
    assert list((tmp_path / "moerl" / "engines").iterdir()) == []


def file_of(name: str) -> Path:
    """File of the module that `name`, a module or something in one, belongs to."""
    path = ROOT.joinpath(*name.split("."))
    if path.with_suffix(".py").is_file():
        return path.with_suffix(".py")
    return path / "__init__.py" if path.is_dir() else file_of(name.rpartition(".")[0])
