"""What moerl adds to SGLang inside its processes, on SGLang's own layers, without a server."""

import ast
import json
import subprocess
from pathlib import Path

import pytest
from test_build_engines import config

from moerl.config.rules.engine_rules import interpreter

pytestmark = pytest.mark.engine

CHECKS = Path(__file__).with_name("sglang_checks.py")
NAMES = [node.name for node in ast.parse(CHECKS.read_text()).body if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")]


@pytest.fixture(scope="module")
def outcomes():
    """By check: what was wrong, or nothing."""
    ended = subprocess.run([interpreter(config(engine="sglang").rollout), str(CHECKS)], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [name.removeprefix("check_") for name in NAMES])
def test_inside_sglang(outcomes, name):
    assert outcomes[name] == ""
