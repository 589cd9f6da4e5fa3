"""Versions of what a run is made of, in this environment and in the engines', and the ranges that moerl supports."""

import ctypes
import functools
import importlib.metadata
import platform
import re
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from moerl.config.derive.package_versions import versions_there
from moerl.hardware.hardware_tools import Absent

TRANSFORMER_ENGINE = "transformer-engine"
"""Where there is no GPU the reference of megatron_patches takes its place."""
TRAINER = ("torch", "megatron-core", TRANSFORMER_ENGINE, "ray", "transformers")
_PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"


@functools.cache
def supported() -> Mapping[str, str]:
    """Package -> range of versions, of every extra: of the checkout, or of the installed moerl. Empty if neither says."""
    if _PYPROJECT.is_file():
        project = tomllib.loads(_PYPROJECT.read_text())["project"]
        texts = [*project["dependencies"], *(text for extra in project["optional-dependencies"].values() for text in extra)]
        ranges = {"python": project["requires-python"]}
    else:
        try:
            texts = importlib.metadata.requires("moerl") or []
        except importlib.metadata.PackageNotFoundError:
            return {}
        ranges = {}
    return ranges | {canonicalize_name(r.name): str(r.specifier) for r in map(Requirement, texts) if r.specifier}


def is_supported(name: str, version: str) -> bool:
    """True as well where moerl states no range."""
    wanted = supported().get(canonicalize_name(name))
    return wanted is None or Requirement(f"x{wanted}").specifier.contains(Version(version), prereleases=True)


def trainer_versions() -> dict[str, str | Absent]:
    """Versions of this environment; loads torch for what it was built with."""
    import torch

    nccl = Absent(reason="this PyTorch is built without NCCL")
    return {
        "python": platform.python_version(),
        **{name: _installed(name) for name in TRAINER},
        TRANSFORMER_ENGINE: _transformer_engine(),
        "CUDA": torch.version.cuda if torch.version.cuda is not None else Absent(reason="this PyTorch is built without CUDA"),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else nccl,
    }


def engine_versions(python: str, names: Sequence[str]) -> dict[str, str] | Absent:
    """Versions of an engine's own environment, whose interpreter is asked."""
    if not Path(python).is_file():
        return Absent(reason=f"there is no {python}")
    try:
        return versions_there(python, names)
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines()
        return Absent(reason=f"{python}: {said[-1] if said else f'ended with code {error.returncode}'}", is_fault=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Absent(reason=f"{python}: {error}", is_fault=True)


def newest_cuda(driver: str) -> int | None:
    """The newest major version of CUDA that a driver runs (CUDA's release notes, minimum required driver versions)."""
    branch = re.match(r"\d+", driver)
    if branch is None:
        return None
    return next((cuda for cuda, oldest in ((13, 580), (12, 525), (11, 450)) if int(branch[0]) >= oldest), None)


def libcuda_version(name: str = "libcuda.so.1") -> int | None:
    """The major version of CUDA that the libcuda found by the loader runs; None if there is none, or it does not say."""
    version = ctypes.c_int(0)
    try:
        status = ctypes.CDLL(name).cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return version.value // 1000 if status == 0 else None


def _transformer_engine() -> str | Absent:
    """Its package holds nothing but requirements: what ranks import is another one's, built for this PyTorch."""
    whole, for_torch = _installed(TRANSFORMER_ENGINE), _installed(f"{TRANSFORMER_ENGINE}-torch")
    if isinstance(for_torch, Absent) and not isinstance(whole, Absent):
        return Absent(reason=f"{whole} without its part for PyTorch (transformer-engine-torch)")
    return whole


def _installed(name: str) -> str | Absent:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Absent(reason="not installed")
