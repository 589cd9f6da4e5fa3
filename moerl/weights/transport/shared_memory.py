"""Memory of one process that others on the same host can map: an anonymous memfd, reached through /proc/PID/fd/N; on a GPU,
gpu_transport.py's.

It has no name in any file system, so the kernel frees it with its last user, however that one ends.
"""

import mmap
import os

import torch

from moerl.cluster.error_texts import LEFT
from moerl.types.errors import WeightError
from moerl.types.push import Bucket
from moerl.weights.transport.gpu_transport import ON_GPU, DeviceBuffer, map_device

_NAME = "moerl-weights"

NUM_BUFFERS = 2
"""Buffers of one process for buckets, which take turns: one is filled while the other is read."""


def new_buffer(device: torch.device) -> "SharedBuffer | DeviceBuffer":
    return DeviceBuffer(device) if device.type == "cuda" else SharedBuffer()


class SharedBuffer:
    """The sender's memory. It only grows, and pages that were never written cost nothing."""

    def __init__(self) -> None:
        self._fd = os.memfd_create(_NAME)
        self._map(1)

    @property
    def source(self) -> str:
        """Valid for processes of the same user in the same process namespace."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def reserve(self, num_bytes: int) -> torch.Tensor:
        """uint8 [at least num_bytes]. The address may change, the bytes stay."""
        if num_bytes > len(self._memory):
            self._map(num_bytes)
        return self._memory

    def release(self) -> None:
        """Give the pages back; who has mapped them finds zeros until they are written again."""
        if self._fd >= 0:
            self._mapped.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        """Safe to call twice. Receivers keep what they have mapped."""
        if self._fd >= 0:
            os.close(self._fd)
            del self._mapped  # which ends with its last tensor
        self._fd, self._memory = -1, torch.empty(0, dtype=torch.uint8)

    def _map(self, num_bytes: int) -> None:
        os.ftruncate(self._fd, num_bytes)
        self._mapped = mmap.mmap(self._fd, num_bytes)
        self._memory = _as_tensor(self._mapped)


class SharedReader:
    """The receiver's view of SharedBuffers in other processes."""

    def __init__(self) -> None:
        self._mapped: dict[str, torch.Tensor] = {}

    def fetch(self, bucket: Bucket, source: str) -> torch.Tensor:
        """uint8 [bucket.num_bytes] in the own memory of who has it, a SharedBuffer's `source`: until that one fills it again."""
        memory = self._mapped.get(source)
        if memory is None or bucket.num_bytes > len(memory):
            memory = self._mapped[source] = _map(source, bucket.num_bytes)
        return memory[: bucket.num_bytes]

    def close(self) -> None:
        """Safe to call twice; the next fetch maps anew."""
        # A mapping ends with its last tensor. mmap.close() would raise while one is alive.
        self._mapped = {}


def _map(source: str, num_bytes: int) -> torch.Tensor:
    if source.startswith(ON_GPU):
        return map_device(source)
    return _as_tensor(_map_foreign(source, num_bytes))


def _as_tensor(memory: mmap.mmap) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)


def _map_foreign(source: str, num_bytes: int) -> mmap.mmap:
    """All of `source`, which must be a SharedBuffer of at least `num_bytes`: reading past its end would kill this process."""
    try:
        target = os.readlink(source)
        if not target.startswith(f"/memfd:{_NAME}"):
            raise WeightError(_unreachable(source, f"it is {target}, not memory of a weight sender"))
        fd = os.open(source, os.O_RDWR | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            if size < max(num_bytes, 1):
                raise WeightError(f"bucket source = {source!r}: holds {size} bytes, but the bucket has {num_bytes}; push again")
            return mmap.mmap(fd, size)
        finally:
            os.close(fd)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and os.path.exists(source.rpartition("/fd/")[0]):
            reason = f"its process has none there, as it {LEFT}, or is in another process namespace, where containers are"
            raise WeightError(f"bucket source = {source!r}: {reason}") from error
        raise WeightError(_unreachable(source, str(error))) from error


def _unreachable(source: str, reason: str) -> str:
    return (
        f"bucket source = {source!r}: this process cannot map the memory of the process that has the bucket ({reason}). Both must run on "
        "one host, as one user and in one process namespace; containers have their own. Set weights.transport=nccl; if it is, give "
        "containers addresses of their own."
    )
