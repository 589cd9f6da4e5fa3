"""Bytes that vLLM's loader put into its model, while the model is loaded anew layer by layer (vllm/model_executor/model_loader/reload).

vLLM keeps the tensors it is given until a layer has all of its own. Then it copies them into new memory in the checkpoint's layout, repacks
that if its kernels want another one, and copies the result to where the kernels read. Each tensor is compared when these copies are made:
with what the kernels read if that has the checkpoint's layout, and otherwise with what was repacked; before that, where it is repacked in
its own memory. The repacking itself shows in the canary's log-probs only.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch

from moerl.rollout.engines.installed_bytes import Copies, CopyLog, LoadWeights, memory_of
from moerl.weights.verify.places import Place, places_of

Verify = Callable[[str, list[Place]], None]
"""WeightSession.verify."""


class LayerwiseBytes:
    """The `load` of a WeightSession's loader, of tensors that are whole and that it keeps."""

    _current: "ClassVar[LayerwiseBytes | None]" = None
    """That which watches."""
    _log: CopyLog

    def __init__(self, load_weights: LoadWeights, verify: Verify):
        """`verify` is told where each tensor lies once vLLM has copied it."""
        self._load_weights, self._verify = load_weights, verify
        self.begin()

    def begin(self) -> None:
        self._kept: dict[int, tuple[str, torch.Tensor]] = {}
        """Tensors that vLLM has not copied yet, by the address of their memory."""

    def __call__(self, name: str, tensor: torch.Tensor) -> list[Place] | None:
        """None: it is kept, and `verify` is told."""
        if tensor.numel():
            self._kept[memory_of(tensor)] = (name, tensor)
        with self.watching():
            self._load_weights([(name, tensor)])
        return None if tensor.numel() else []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Copies that vLLM makes inside are compared with what was sent."""
        try:
            with CopyLog() as self._log:
                LayerwiseBytes._current = self
                yield
        finally:
            LayerwiseBytes._current = None
        self._compare_copied()

    @classmethod
    def repacks_in_place(cls) -> None:
        """Compares what has been loaded so far: what it is repacked to is about to overwrite it."""
        if cls._current is not None:
            cls._current._compare_copied()

    def _compare_copied(self) -> None:
        copies, self._log.copies = self._log.copies, []
        with torch._C.DisableTorchFunction():  # comparing makes copies of its own
            self._compare([(target, source) for target, source in copies if not target.is_meta and not source.is_meta])

    def _compare(self, copies: Copies) -> None:
        places: dict[int, list[Place]] = {}
        moves = [(target, source) for target, source in copies if memory_of(source) not in self._kept and _is_whole(source)]
        for target, source in copies:
            if (kept := self._kept.get(memory_of(source))) is not None:
                places.setdefault(memory_of(source), []).extend(places_of(_followed(target, moves), source, kept[1]))
        for address, found in places.items():
            self._verify(self._kept.pop(address)[0], found)


def _is_whole(source: torch.Tensor) -> bool:
    return source.untyped_storage().nbytes() == source.numel() * source.element_size()


def _followed(target: torch.Tensor, moves: Copies) -> torch.Tensor:
    """Memory to which `target` went when all of its memory was copied on, in the same layout; else `target`."""
    for moved, source in moves:
        same = (moved.shape, moved.stride(), moved.dtype) == (source.shape, source.stride(), source.dtype)
        if same and memory_of(source) == memory_of(target):
            target = moved.as_strided(target.shape, target.stride(), moved.storage_offset() + target.storage_offset())
    return target
