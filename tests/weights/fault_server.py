"""The hf server with a loader that does what a file says: `python fault_server.py FAULT_FILE --model DIR ...`.

The file holds a fault and a tensor's name. flip: one bit of what was installed. repack: what arrives is kept and verified, and never
reaches the memory that the model computes with. Anything else: no fault.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import moerl.rollout.engines.hf.__main__ as server
from moerl.types.push import TensorSpec
from moerl.weights.installation import Loader
from moerl.weights.verify.places import Place, Start, copy_into
from moerl.weights.weight_session import WeightSession

FAULT = Path(sys.argv.pop(1))


def session(specs: Mapping[str, TensorSpec], loader: Loader, **options: Any) -> WeightSession:
    def damaging(name: str, start: Start, piece: torch.Tensor) -> Sequence[Place] | None:
        fault, _, target = FAULT.read_text().partition(" ")
        if fault == "repack":
            return copy_into(torch.empty(specs[name].shape, dtype=piece.dtype), start, piece)
        places = loader.load(name, start, piece)
        if fault == "flip" and name == target and places:
            places[0].target.view(torch.uint8).view(-1)[0] ^= 1
        return places

    return WeightSession(specs, Loader(load=damaging), **options)


if __name__ == "__main__":
    server.WeightSession = session
    server.main()
