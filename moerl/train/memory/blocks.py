"""A storage whose bytes can leave the device and come back without anybody who holds a view of them noticing.

While they are away the storage has size 0 and keeps its identity, so that parameters, buckets, shards and the optimizer's references
stay what they are. Reading one then is an error of the caller; moerl/train/memory/memory_states.py keeps it from happening.
"""

import torch
from torch import Tensor


class Block:
    """One storage. `is_kept`: its contents are copied to the host; else they are zeros when it comes back."""

    def __init__(self, storage: torch.UntypedStorage, *, is_kept: bool):
        self.storage, self._is_kept = storage, is_kept
        self._num_bytes = storage.nbytes()
        self._host: Tensor | None = None

    @property
    def device_bytes(self) -> int:
        return self.storage.nbytes()

    @property
    def host_bytes(self) -> int:
        return 0 if self._host is None else self._host.nbytes

    def leave(self) -> None:
        if self.storage.nbytes() == 0:
            return
        if self._is_kept:
            if self._host is None:
                self._host = torch.empty(self._num_bytes, dtype=torch.uint8, device="cpu", pin_memory=torch.cuda.is_available())
            self._host.copy_(self._view(), non_blocking=True)
        # On the copy's own stream: the allocator gives the memory to nobody before the copy has read it.
        self.storage.resize_(0)

    def come_back(self) -> None:
        if self.storage.nbytes() == self._num_bytes:
            return
        self.storage.resize_(self._num_bytes)
        if self._host is None:
            self._view().zero_()
        else:
            self._view().copy_(self._host, non_blocking=True)

    def _view(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)
