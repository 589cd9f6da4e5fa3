"""Versions here and in another environment, the ranges that moerl states, and what a driver runs."""

import shutil
import subprocess
import sys

import pytest

from moerl.doctor.checks.versions import engine_versions, is_supported, libcuda_version, newest_cuda, supported, trainer_versions
from moerl.hardware.hardware_tools import Absent


def test_ranges_are_those_of_the_project():
    assert supported()["megatron-core"] == "<0.20,>=0.16.1"
    assert {"python", "torch", "ray", "sglang", "vllm", "transformer-engine"} <= set(supported())


@pytest.mark.parametrize(
    ("name", "version", "expected"),
    [("torch", "2.13.0+cpu", True), ("torch", "2.9.1", False), ("ray", "3.0.0", False), ("vllm", "0.33.1", True), ("anything", "1", True)],
)
def test_a_version_is_held_to_its_range_if_there_is_one(name, version, expected):
    assert is_supported(name, version) == expected


def test_this_environment_has_what_a_trainer_needs_or_says_what_is_missing():
    found = trainer_versions()
    assert all(is_supported(name, version) for name, version in found.items() if not isinstance(version, Absent))
    assert isinstance(found["torch"], str)
    assert isinstance(found["megatron-core"], str)


def test_an_engine_s_environment_is_asked_through_its_interpreter(tmp_path):
    assert {"ray", "python"} <= engine_versions(sys.executable, ["ray", "no-such-package"]).keys() <= {"ray", "python", "CUDA", "NCCL"}
    assert engine_versions(str(tmp_path / "python"), ["vllm"]) == Absent(reason=f"there is no {tmp_path / 'python'}")
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'libpython3.11.so: cannot open shared object file' >&2\nexit 127\n")
    broken.chmod(0o755)
    found = engine_versions(str(broken), ["vllm"])
    assert found == Absent(reason=f"{broken}: libpython3.11.so: cannot open shared object file", is_fault=True)


@pytest.mark.parametrize(("driver", "cuda"), [("580.65.06", 13), ("550.54.15", 12), ("470.57.02", 11), ("418.1", None), ("", None)])
def test_a_driver_runs_cuda_up_to_a_version(driver, cuda):
    assert newest_cuda(driver) == cuda


def test_the_libcuda_that_is_found_says_what_it_runs(tmp_path):
    """As that of a forward-compatibility package does, built here: newer than the driver."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    source = tmp_path / "compat.c"
    source.write_text("int cuDriverGetVersion(int *version) { *version = 13010; return 0; }\n")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", source], check=True)
    assert libcuda_version(str(tmp_path / "libcuda.so.1")) == 13
    assert libcuda_version(str(tmp_path / "libcuda.so.2")) is None
    assert libcuda_version("libc.so.6") is None
