"""Buckets that stay on a GPU: memory shared by CUDA IPC, and a group over NCCL. Not run so far (tests/gpu).

Everything else of the transports is the same code on CPU, where memory is a memfd (shared_memory.py) and the group gloo's
(network_transport.py).
"""

import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from moerl.cluster.error_texts import LATE
from moerl.types.errors import WeightError
from moerl.weights.transport.rendezvous import Deadline

ON_GPU = "cuda:"
"""Begins the `source` of memory on a GPU."""

_NO_PEERS = "they must be peers, by NVLink or PCIe: set weights.transport=nccl"
_EXPANDABLE = (
    "it is in expandable segments, which PyTorch maps by files of the process that has them, and the kernel gives those to one that may "
    "trace it alone (ptrace): leave expandable_segments out of PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF in train.environment"
)


class DeviceBuffer:
    """As SharedBuffer of shared_memory.py, on a GPU. Between two releases it only grows; its source is another one then."""

    def __init__(self, device: torch.device):
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self.source = ""

    def reserve(self, num_bytes: int) -> torch.Tensor:
        """uint8 [at least num_bytes]"""
        if num_bytes > len(self._memory):
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            # Once for each allocation: torch keeps a count of what was shared, and many processes may map one handle.
            self.source = _source_of(self._memory)
        return self._memory

    def release(self) -> None:
        """Give the memory back, until the next `reserve`. PyTorch frees it when nobody has it mapped any more."""
        self.source, self._memory = "", torch.empty(0, dtype=torch.uint8, device=self._device)

    def close(self) -> None:
        """Safe to call twice."""
        self.source, self._memory = "", torch.empty(0, dtype=torch.uint8)


def map_device(source: str) -> torch.Tensor:
    """All of a DeviceBuffer in another process of this host. The tensor is one of this process's current GPU, where its model is, also if
    it sees the other's, as a server of several does: a tensor of that one could not be compared with what is held here, and this process
    would get a context there. cudaIpcOpenMemHandle maps memory for the current GPU, which must reach it as a peer, by NVLink or PCIe ("can
    open handles to devices that may not be visible in the process calling the API", cuda_runtime_api.h)."""
    *shared, uuid = json.loads(source.removeprefix(ON_GPU))
    torch.cuda.init()
    device = torch.device("cuda", torch.cuda.current_device())
    *arguments, _ = [bytes.fromhex(value) if isinstance(value, str) else value for value in shared]
    # No event to wait for, the last argument: the sender's GPU was done with the bucket when it told of it (`finished`).
    try:
        storage = torch.UntypedStorage._new_shared_cuda(device.index, *arguments, False)
    except RuntimeError as error:
        said = str(error).splitlines()[0]
        rule = f"GPU {uuid} has the bucket, and this process cannot map its memory on {device} ({said})"
        raise WeightError(f"{rule}; {_EXPANDABLE if 'pidfd' in said else _NO_PEERS}") from error
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _source_of(memory: torch.Tensor) -> str:
    _, *shared = memory.untyped_storage()._share_cuda_()
    values = [value.hex() if isinstance(value, bytes) else value for value in shared]
    return ON_GPU + json.dumps([*values, str(torch.cuda.get_device_properties(memory.device).uuid)])


def finished(device: torch.device) -> None:
    """Returns when what this thread has queued on the GPU is done, before another process reads or overwrites it. It must not wait for
    other streams: NCCL's has sends and receives whose other side may wait for this one."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class Transfer(NamedTuple):
    """Bucket between this process and another of a group."""

    data: torch.Tensor  # uint8
    peer: int
    """The other's rank in the group."""
    tag: int


class NcclGroup:
    """Buckets between any two ranks over one communicator of all: NCCL runs its operations in order, which must be that of the rounds."""

    def __init__(self, store: dist.Store, *, rank: int, world_size: int, device: torch.device, deadline: Deadline, seconds: float):
        """Until all have joined, at the `deadline`; but NCCL's own start has none. `seconds` of a push bound every bucket."""
        kind: Any = dist.ProcessGroupNCCL  # absent from builds for CPU
        options = kind.Options()
        options._timeout = timedelta(seconds=2 * seconds)  # torch then ends the process; `wait` gives up before
        torch.cuda.set_device(device)
        self._store = store  # C++ alone would not keep one that is written in Python
        self._only = kind(dist.PrefixStore("moerl/weights", store), rank, world_size, options)
        # All make the communicator here. Otherwise the first bucket of any two would, and wait in it for all others.
        try:
            self.wait(self._only.allreduce([torch.zeros(1, device=device)]), deadline)
        except Exception:
            self.close()
            raise

    def begin(self, out: Transfer | None, into: Transfer | None) -> Any:
        """Work to wait for; None: nothing. Both are one operation to NCCL, so that a ring of ranks which each send and receive does not
        wait for itself. Outside of a batch torch makes a communicator for every two ranks. NCCL knows no tags."""
        if out is None and into is None:
            return None
        self._only._start_coalescing()
        if out is not None:
            self._only.send([out.data], out.peer, out.tag)
        if into is not None:
            self._only.recv([into.data], into.peer, into.tag)
        return self._only._end_coalescing()

    def wait(self, work: Any, deadline: Deadline, check: Callable[[], None] | None = None) -> None:
        """Returns when the GPU has done it. `check` raises when a side is gone, which NCCL would not tell."""
        while work is not None and not work.is_completed():
            if deadline.has_passed():
                raise WeightError(f"a bucket {LATE} {deadline} over NCCL")
            if check is not None:
                check()
            time.sleep(0.0005)  # wait() would return when the GPU has queued the work, not when it is done
        if work is not None:
            work.wait()

    def close(self) -> None:
        self._only.abort()
        del self._only
