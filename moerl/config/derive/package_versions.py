"""Versions of an environment's packages, read from what is installed: nothing is imported. As a script it says those of the interpreter
that runs it, which need not have moerl."""

import importlib.metadata
import importlib.util
import json
import platform
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_SECONDS = 60.0
_NCCL = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
"""Its packages, by the version of CUDA; those of PyTorch's wheels."""


def versions_here(names: Sequence[str]) -> dict[str, str]:
    """Package -> version, of those that are installed; CUDA: that PyTorch was built for, and NCCL: that it brings, where they are known."""
    found = {"python": platform.python_version()}
    for name in (*names, *_NCCL):
        if any(importlib.metadata.distributions(name=name)):
            found["NCCL" if name in _NCCL else name] = importlib.metadata.version(name)
    torch = importlib.util.find_spec("torch")
    file = Path(torch.origin).with_name("version.py") if torch is not None and torch.origin is not None else None
    cuda = runpy.run_path(str(file)).get("cuda") if file is not None and file.is_file() else None
    return found if cuda is None else found | {"CUDA": cuda}


def versions_there(python: str, names: Sequence[str]) -> dict[str, str]:
    """The same of another environment, whose interpreter is asked. OSError, CalledProcessError, TimeoutExpired: it cannot be."""
    command = [python, __file__, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    print(json.dumps(versions_here(sys.argv[1:])))
