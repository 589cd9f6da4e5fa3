"""Images of containers/, read: nothing here builds one. Whether their locks can be installed: tests/wheels/test_lock_files.py."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import moerl

ROOT = Path(moerl.__file__).resolve().parent.parent
CONTAINERS = ROOT / "containers"
DOCKERFILE, DEFINITION = (CONTAINERS / "Dockerfile").read_text(), (CONTAINERS / "moerl.def").read_text()


@pytest.mark.parametrize("script", sorted([*CONTAINERS.glob("*.sh"), *(ROOT / "scripts").glob("*.sh")]), ids=lambda file: file.name)
def test_shellcheck_finds_nothing(script: Path):
    program = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which("shellcheck")
    assert program is not None, "shellcheck is one of the development tools: pip install -e '.[dev]'"
    assert subprocess.run([program, "--norc", script], capture_output=True, text=True).stdout == ""


def test_both_kinds_of_image_begin_with_the_same_one_and_run_the_same_scripts():
    (base,) = re.findall(r"^ARG BASE=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert re.findall(r"^From: (\S+)$", DEFINITION, re.MULTILINE) == [base]

    def runs(text: str) -> set[str]:
        return {re.sub(r"[\"${} ]", "", found) for found in re.findall(r"bash (containers/.*)$", text, re.MULTILINE)}

    assert runs(DOCKERFILE) == runs(DEFINITION)
    assert {Path(found).stem for found in runs(DOCKERFILE) if "install" not in found} == {"system", "add_moerl"}


def test_what_they_copy_is_there_and_what_they_install_has_a_lock():
    copied = [word for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE) for word in line.split()[:-1]]
    copied += re.findall(r"^    (\S+) /opt/moerl/\S+$", DEFINITION, re.MULTILINE)
    assert len(copied) > 10
    assert [name for name in copied if not (ROOT / name).exists()] == []
    for engine in ("sglang", "vllm"):
        assert (ROOT / "locks" / f"{engine}.txt").is_file() and (ROOT / "locks" / f"trainer-{engine}.txt").is_file()


def test_servers_are_looked_for_where_the_image_has_them():
    """moerl is installed there editable, and asks beside its own files (config/rules/engine_rules.py, interpreter)."""
    from moerl.config.load import load
    from moerl.config.rules.engine_rules import interpreter

    (directory,) = re.findall(r"^WORKDIR (\S+)$", DOCKERFILE, re.MULTILINE)
    rollout = load(["recipe=grpo-qwen3-235b-16n8g-sync"]).rollout
    inside = Path(interpreter(rollout)).relative_to(ROOT)
    assert f"{directory}/{inside.parts[0]}" in DOCKERFILE.replace("${ENGINE}", rollout.engine)


def test_an_image_has_the_programs_that_kuberay_runs_in_a_pod():
    """Probes of KubeRay 1.5: bash -c "wget ... | grep success" (controllers/ray/common/pod.go, initLivenessAndReadinessProbe)."""
    assert "wget" in (CONTAINERS / "system.sh").read_text().split()


def test_what_is_built_from_source_is_named_by_commit():
    script = (CONTAINERS / "install.sh").read_text()
    commits = dict(re.findall(r"^([A-Z]+)=([0-9a-f]{40})\b", script, re.MULTILINE))
    assert set(re.findall(r"@\$([A-Z]+)\"", script)) == commits.keys() == {"APEX", "DEEPEP"}
