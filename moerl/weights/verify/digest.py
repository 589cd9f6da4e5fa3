"""The bytes of a tensor, and their xxh3_128 digest. Copies nothing for a contiguous CPU tensor."""

import ctypes

import torch
import xxhash


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [num_bytes] on CPU, in row-major order: a view where the memory allows it, else a copy."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def tensor_digest(tensor: torch.Tensor) -> str:
    """xxh3_128 of the tensor's row-major bytes as 32 hex digits. Shape and dtype are not part of it."""
    data = tensor_bytes(tensor)
    # Not through numpy: torch would never again resize the storage of a parameter that numpy has seen, as offloading it does.
    return xxhash.xxh3_128_hexdigest((ctypes.c_char * data.numel()).from_address(data.data_ptr()) if data.numel() else b"")
