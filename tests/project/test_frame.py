"""The files around the code: pins, set-up, license."""

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in lines), "only NAME==VERSION: no paths, no local versions"
    return {canonicalize_name(name): pin for name, pin in (line.split("==") for line in lines)}


def requirements() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"]
    return [Requirement(text) for text in (*PROJECT["dependencies"], *extras["wandb"], *extras["real"], *extras["dev"])]


def test_every_dependency_is_pinned_to_a_version_it_allows():
    for requirement in requirements():
        if requirement.name != "moerl":
            assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)]), requirement


def test_the_base_dependencies_need_no_gpu_package():
    names = {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]}
    assert not names & {"transformer-engine", "vllm", "sglang", "flash-attn"}
    assert not [name for name in names if "cuda" in name or "nvidia" in name]


def test_the_environment_holds_the_pinned_torch():
    assert version("torch").split("+")[0] == pins()["torch"]


def test_the_license_is_the_unchanged_apache_text():
    text = (ROOT / "LICENSE").read_text()
    assert text.strip().startswith("Apache License\n                           Version 2.0, January 2004")
    assert "END OF TERMS AND CONDITIONS" in text


def set_up_with(python: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Runs the set-up with an interpreter that cannot be used, so it ends before it touches any environment."""
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    command = ["bash", str(ROOT / "scripts" / "setup.sh")]
    return subprocess.run(command, env={**os.environ, "PYTHON": str(python)}, capture_output=True, text=True, check=False, timeout=60)


def test_set_up_names_an_interpreter_that_does_not_run(tmp_path):
    done = set_up_with(tmp_path / "python3.12", "echo no such version >&2; exit 127")
    assert done.returncode != 0
    assert "moerl needs Python 3.11 or newer" in done.stderr
    assert "python3.12: does not run" in done.stderr
    assert "make PYTHON=" in done.stderr


def test_set_up_names_the_version_of_an_interpreter_that_is_too_old(tmp_path):
    done = set_up_with(tmp_path / "python3", 'case "$2" in *python_version*) echo 3.9.18;; *version_info*) exit 1;; esac')
    assert done.returncode != 0
    assert "python3: Python 3.9.18" in done.stderr


def test_set_up_names_an_interpreter_without_venv(tmp_path):
    done = set_up_with(tmp_path / "python3.11", 'case "$2" in *python_version*) echo 3.11.2;; *) exit 1;; esac')
    assert done.returncode != 0
    assert "python3.11: Python 3.11.2, without the venv module" in done.stderr


def test_packages_come_from_where_pips_configuration_says(tmp_path):
    """scripts/install.sh hands it to uv, here one that prints what it was given."""
    uv = tmp_path / "moerl" / f"uv-{pins()['uv']}" / "bin" / "uv"
    uv.parent.mkdir(parents=True)
    uv.write_text('#!/bin/sh\nenv | grep -E "^(UV_|SSL_)"\necho "$@"\n')
    uv.chmod(0o755)
    pip = tmp_path / "pip.conf"
    pip.write_text(
        "[global]\nindex-url = https://mirror.example/simple\nextra-index-url =\n    https://one.example\n    https://two.example\n"
    )
    venv = Path(sys.prefix)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_", "SSL_"))}
    told = {"XDG_CACHE_HOME": str(tmp_path), "PIP_CONFIG_FILE": str(pip), "PIP_FIND_LINKS": "/wheels", "PIP_CERT": "/ca.pem"}
    command = ["bash", str(ROOT / "scripts" / "install.sh"), str(venv), "numpy"]
    done = subprocess.run(command, env={**environment, **told}, capture_output=True, text=True, check=True, timeout=60)
    assert "UV_DEFAULT_INDEX=https://mirror.example/simple\n" in done.stdout
    assert "UV_INDEX=https://one.example https://two.example\n" in done.stdout
    assert "UV_FIND_LINKS=/wheels\n" in done.stdout
    assert "SSL_CERT_FILE=/ca.pem\n" in done.stdout
    assert done.stdout.splitlines()[-1].endswith(f"--python {venv}/bin/python numpy")
    own = subprocess.run(command, env={**environment, **told, "UV_INDEX": "mine"}, capture_output=True, text=True, check=True, timeout=60)
    assert "UV_INDEX=mine\n" in own.stdout
