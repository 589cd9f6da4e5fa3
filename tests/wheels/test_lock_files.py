"""The package index has what locks/ and the extras of pyproject.toml name, for Python 3.12 on Linux. Asks for metadata alone."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.wheels


def uv() -> str:
    program = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    assert program is not None, "uv is one of the development tools: pip install -e '.[dev]'"
    return program


def test_locks_are_what_their_inputs_resolve_to(tmp_path):
    """Starting from them: what has been released since does not count."""
    for lock in (ROOT / "locks").glob("*.txt"):
        shutil.copy(lock, tmp_path)
    environment = os.environ | {"UV": uv(), "LOCKS": str(tmp_path)}
    done = subprocess.run(["bash", ROOT / "scripts" / "locks.sh"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for lock in tmp_path.iterdir():
        assert lock.read_text() == (ROOT / "locks" / lock.name).read_text(), f"{lock.name}: make locks"


@pytest.mark.parametrize("extra", ["gpu", "sglang", "vllm"])
def test_an_extra_can_be_installed(extra, tmp_path):
    command = [uv(), "pip", "compile", "--quiet", "--config-file", "locks/uv.toml", "--python-version=3.12"]
    where = ["--python-platform=x86_64-manylinux_2_34", "--extra", extra, f"--output-file={tmp_path}/out.txt", "pyproject.toml"]
    done = subprocess.run([*command, *where], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    installed = (tmp_path / "out.txt").read_text()
    assert f"\n{'transformer-engine-torch' if extra == 'gpu' else extra}==" in installed
