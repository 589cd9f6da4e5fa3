"""The digest of a tensor, made where its bytes are: a sum over blocks, each of which can be hashed alone and in any order.

A block is 64 KiB of the row-major bytes; the last one is filled up with zeros to a multiple of 1 KiB, which shape and dtype tell from
zeros of the tensor. Block b with xxh3_128 (low_b, high_b) adds (2 b + 1) low_b to the first half of the digest and (2 b + 1) high_b to the
second, modulo 2**64. In host memory the package xxhash hashes; on a GPU a kernel of Triton, or PyTorch where there is no Triton.
"""

import ctypes
from collections.abc import Iterable

import torch
import xxhash

from moerl.weights.verify.block_hashes import block_hashes, signed

BLOCK_BYTES = 64 * 1024
_GRAIN = 1024
"""Bytes that a last block has a multiple of."""
_MASK = 2**64 - 1


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [num_bytes] on CPU, in row-major order: a view where the memory allows it, else a copy."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def tensor_digest(tensor: torch.Tensor) -> str:
    """Digest as 32 hex digits. Shape and dtype are not part of it. Reads the bytes once; on a GPU 16 bytes of each block leave it."""
    if tensor.device.type == "cpu":
        return _hex(*_halves_on_host(tensor_bytes(tensor)))
    return hex_digests([digest_halves(tensor)])[0]


def digest_halves(tensor: torch.Tensor) -> torch.Tensor:
    """int64 [2] where the tensor is: its digest. A GPU is not waited for."""
    if tensor.device.type == "cpu":
        return torch.tensor([signed(half) for half in _halves_on_host(tensor_bytes(tensor))])
    return halves_on_device(tensor.detach().contiguous().reshape(-1).view(torch.uint8))


def hex_digests(halves: Iterable[torch.Tensor]) -> list[str]:
    """Hex digits of many digests. A device that has all of them is waited for once."""
    rows = list(halves)
    if not rows:
        return []
    together = torch.stack([row.to(rows[0].device) for row in rows])
    return [_hex(low, high) for low, high in together.tolist()]


def halves_on_device(data: torch.Tensor) -> torch.Tensor:
    """`data`: uint8 [num_bytes], contiguous."""
    if data.data_ptr() % 8 or data.storage_offset() % 8:  # a view of a larger tensor, which begins within a word
        data = data.clone()
    num_blocks, rest = divmod(len(data), BLOCK_BYTES)
    parts = []
    if num_blocks:
        parts.append(block_hashes(data[: num_blocks * BLOCK_BYTES].view(num_blocks, BLOCK_BYTES)))
    if rest:
        last = data.new_zeros(1, -(-rest // _GRAIN) * _GRAIN)
        last[0, :rest] = data[num_blocks * BLOCK_BYTES :]
        parts.append(block_hashes(last))
    if not parts:
        return torch.zeros(2, dtype=torch.int64, device=data.device)
    hashes_B2 = torch.cat(parts)
    return (hashes_B2 * (2 * torch.arange(len(hashes_B2), device=data.device) + 1)[:, None]).sum(dim=0)


def _halves_on_host(data: torch.Tensor) -> tuple[int, int]:
    """Not yet modulo 2**64."""
    # Not through numpy: torch would never again resize the storage of a parameter that numpy has seen, as offloading it does.
    memory = memoryview((ctypes.c_char * len(data)).from_address(data.data_ptr())) if len(data) else memoryview(b"")
    low = high = 0
    for block, start in enumerate(range(0, len(data), BLOCK_BYTES)):
        part: memoryview | bytes = memory[start : start + BLOCK_BYTES]
        if len(part) % _GRAIN:
            part = bytes(part).ljust(-(-len(part) // _GRAIN) * _GRAIN, b"\0")
        found = xxhash.xxh3_128_intdigest(part)
        low, high = low + (2 * block + 1) * found, high + (2 * block + 1) * (found >> 64)
    return low, high


def _hex(low: int, high: int) -> str:
    return f"{high & _MASK:016x}{low & _MASK:016x}"
