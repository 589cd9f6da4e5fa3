"""XXH3's 128-bit hash of many blocks at once, on the device that they are on: https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md.

Blocks are equally long and of whole kibibytes, so that only the algorithm for long inputs is needed, with no seed: 8 sums of 64 bits take
in 16 stripes of 64 bytes, are scrambled, and so on; the last stripe has a secret of its own. Within 16 stripes the order does not matter.
"""

import importlib.util
from functools import cache

import torch

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364ea"
    "c5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)  # fmt: skip
_P32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_P64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
_AVALANCHE = 0x165667919E3779F9
_LOW32 = 0xFFFFFFFF
STRIPES = 16
"""Stripes of 64 bytes between two scrambles."""
_SCRAMBLE_AT, _LAST_AT, _MERGE_AT = 128, 121, (11, 117)
"""Bytes of the secret where the words for scrambling, for the last stripe and for the two halves of the result begin."""


def signed(value: int) -> int:
    """The low 64 bits, as PyTorch's integers have them."""
    return (value & (2**64 - 1)) - (2**64 if value >> 63 & 1 else 0)


def _words(start: int, count: int) -> list[int]:
    return [signed(int.from_bytes(_SECRET[start + 8 * n : start + 8 * n + 8], "little")) for n in range(count)]


def starts(num_bytes: int) -> tuple[int, int]:
    """Beginnings of the two halves of the result."""
    return signed(num_bytes * _P64[0]), signed(~(num_bytes * _P64[1]))


INITIAL = [signed(each) for each in (_P32[2], _P64[0], _P64[1], _P64[2], _P64[3], _P32[1], _P64[4], _P32[0])]


def block_hashes(blocks: torch.Tensor) -> torch.Tensor:
    """uint8 [blocks, bytes], contiguous, bytes a multiple of 1024 -> int64 [blocks, 2]: low and high half of each block's xxh3_128."""
    words_BW = blocks.view(torch.int64)
    if blocks.device.type == "cuda" and _has_triton():
        from moerl.weights.verify.block_kernel import hash_blocks

        return hash_blocks(words_BW, table(blocks.device), starts(blocks.shape[1]))
    return by_torch(words_BW)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def table(device: torch.device) -> torch.Tensor:
    """int64 [24 + 8 + 16 + 8]: words of the secret for stripes and scrambling, for the last stripe, for both halves; what the sums begin
    with."""
    words = _words(0, 24) + _words(_LAST_AT, 8) + _words(_MERGE_AT[0], 8) + _words(_MERGE_AT[1], 8) + INITIAL
    return torch.tensor(words, device=device)


def by_torch(words_BW: torch.Tensor) -> torch.Tensor:
    """`block_hashes` in PyTorch's operators. Integers wrap around."""
    secret, device = table(words_BW.device), words_BW.device
    sums_B8 = secret[48:].repeat(len(words_BW), 1)
    keys_S8 = torch.stack([secret[n : n + 8] for n in range(STRIPES)])
    kibis = words_BW.view(len(words_BW), -1, STRIPES, 8)
    swapped = torch.arange(8, device=device) ^ 1
    for kibi in range(kibis.shape[1]):
        is_last = kibi == kibis.shape[1] - 1
        data_BS8 = kibis[:, kibi]
        keys = torch.cat([keys_S8[:-1], secret[None, 24:32]]) if is_last else keys_S8
        mixed = data_BS8 ^ keys
        sums_B8 = sums_B8 + (data_BS8[:, :, swapped] + (mixed & _LOW32) * _shifted(mixed, 32)).sum(dim=1)
        if not is_last:
            sums_B8 = (sums_B8 ^ _shifted(sums_B8, 47) ^ secret[_SCRAMBLE_AT // 8 : _SCRAMBLE_AT // 8 + 8]) * _P32[0]
    halves = zip((32, 40), starts(words_BW.shape[1] * 8), strict=True)
    return torch.stack([_merged(sums_B8 ^ secret[at : at + 8], start) for at, start in halves], dim=1)


def _merged(mixed_B8: torch.Tensor, start: int) -> torch.Tensor:
    a, b = mixed_B8[:, ::2], mixed_B8[:, 1::2]
    total = (a * b ^ _high(a, b)).sum(dim=1) + start
    total = (total ^ _shifted(total, 37)) * _AVALANCHE
    return total ^ _shifted(total, 32)


def _shifted(value: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, as of unsigned integers."""
    return (value >> bits) & (2 ** (64 - bits) - 1)


def _high(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The high 64 bits of the product, as of unsigned integers."""
    a0, a1, b0, b1 = a & _LOW32, _shifted(a, 32), b & _LOW32, _shifted(b, 32)
    middle = a1 * b0 + _shifted(a0 * b0, 32)
    other = a0 * b1 + (middle & _LOW32)
    return a1 * b1 + _shifted(middle, 32) + _shifted(other, 32)
