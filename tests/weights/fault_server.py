"""The hf server with a loader that does what a file says: `python fault_server.py FAULT_FILE --model DIR ...`.

The file holds a fault and a tensor's name. flip: one bit of what was installed. repack: what arrives is kept and verified, and never
reaches the memory that the model computes with. Anything else: no fault.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import moerl.rollout.engines.hf.__main__ as server
from moerl.types.push import TensorSpec
from moerl.weights.receive import Load, WeightSession

FAULT = Path(sys.argv.pop(1))


def session(specs: Mapping[str, TensorSpec], load: Load, **options: Any) -> WeightSession:
    def damaging(name: str, tensor: torch.Tensor) -> torch.Tensor:
        fault, _, target = FAULT.read_text().partition(" ")
        if fault == "repack":
            return tensor.clone()
        installed = load(name, tensor)
        if fault == "flip" and name == target:
            installed.view(torch.uint8).view(-1)[0] ^= 1
        return installed

    return WeightSession(specs, damaging, **options)


if __name__ == "__main__":
    server.WeightSession = session
    server.main()
