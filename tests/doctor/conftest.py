"""Lets tests import `node_cases`, and puts fake tools on PATH: shell scripts that print the files of outputs/."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from node_cases import OUTPUTS


@pytest.fixture
def fake_tools(tmp_path, monkeypatch):
    """fake_tools(ibv_devinfo="cat ibv_devinfo.txt", ...): each is a shell script's body, run in outputs/, with the arguments in $*."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def make(**bodies: str) -> Path:
        for name, body in bodies.items():
            tool = folder / name.replace("_smi", "-smi")
            tool.write_text(f"#!/bin/sh\ncd {OUTPUTS}\n{body}\n")
            tool.chmod(0o755)
        return folder

    return make


H100 = """case "$*" in
    *fabric*) cat h100_fabric.csv ;;
    *query-remapped-rows*) cat h100_remapped.csv ;;
    *clocks_event_reasons*) cat h100_query.csv ;;
    *topo*) cat h100_topo.txt ;;
    *nvlink*) cat h100_nvlink.txt ;;
    *) echo "unexpected arguments: $*" >&2; exit 2 ;;
esac"""


@pytest.fixture
def h100_node(fake_tools):
    """nvidia-smi of eight H100 and ibv_devinfo of their adapters."""
    return fake_tools(nvidia_smi=H100, ibv_devinfo="cat ibv_devinfo.txt")
