"""A storage whose bytes can leave the device and come back without anybody who holds a view of them noticing.

While they are away the storage has size 0 and keeps its identity, so that parameters, buckets, shards and the optimizer's references
stay what they are. Reading one then is an error of the caller; moerl/train/memory/memory_states.py keeps it from happening.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

_SMALLEST_PIECE = 2**20


class Block:
    """One storage. `is_kept`: its contents are copied to the host; else they are zeros when it comes back."""

    def __init__(self, storage: torch.UntypedStorage, *, is_kept: bool):
        self.storage, self._is_kept = storage, is_kept
        self._num_bytes = storage.nbytes()
        self._host: list[Tensor] = []

    @property
    def device_bytes(self) -> int:
        return self.storage.nbytes()

    @property
    def host_bytes(self) -> int:
        return sum(piece.nbytes for piece in self._host)

    def leave(self) -> None:
        if self.storage.nbytes() == 0:
            return
        if self._is_kept:
            if not self._host:
                is_pinned = torch.cuda.is_available()
                self._host = [torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=is_pinned) for size in pieces(self._num_bytes)]
            for piece, view in self._pairs():
                piece.copy_(view, non_blocking=True)
        # On the copy's own stream: the allocator gives the memory to nobody before the copy has read it.
        self.storage.resize_(0)

    def come_back(self) -> None:
        if self.storage.nbytes() == self._num_bytes:
            return
        self.storage.resize_(self._num_bytes)
        if not self._host:
            self._view().zero_()
        for piece, view in self._pairs():
            view.copy_(piece, non_blocking=True)

    def _view(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Pieces on the host, each with its part on the device."""
        return zip(self._host, self._view().split([piece.nbytes for piece in self._host]), strict=True) if self._host else iter(())


def pieces(num_bytes: int) -> Iterator[int]:
    """Sizes that add up, powers of two but the last: PyTorch rounds a page-locked allocation up to one, which would make 8 of 4.1 GB
    (aten/src/ATen/core/CachingHostAllocator.h)."""
    while num_bytes > _SMALLEST_PIECE:
        yield (size := 1 << (num_bytes.bit_length() - 1))
        num_bytes -= size
    if num_bytes:
        yield num_bytes
