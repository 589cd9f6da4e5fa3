"""XXH3 of many blocks as a kernel of Triton (block_hashes.py says what it computes)."""

import torch
import triton
import triton.language as tl

ROWS = 16
"""Blocks of a program: with 8 lanes each, four warps."""


@triton.jit
def _hash_kernel(words, table, out, count, num_kibis, low_start, high_start, rows: tl.constexpr):
    """words [count, num_kibis * 128] and table in int64; out [count, 2]."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    lane = tl.arange(0, 8)
    mask = (row < count)[:, None]
    begins = words + row.to(tl.int64)[:, None] * num_kibis * 128
    sums = (tl.load(table + 48 + lane)[None, :] + tl.zeros((rows, 8), tl.int64)).to(tl.uint64, bitcast=True)
    scramble = tl.load(table + 16 + lane).to(tl.uint64, bitcast=True)[None, :]
    for kibi in range(num_kibis):
        for stripe in range(16):
            at = kibi * 128 + stripe * 8
            data = tl.load(begins + at + lane[None, :], mask=mask, other=0).to(tl.uint64, bitcast=True)
            other = tl.load(begins + at + (lane ^ 1)[None, :], mask=mask, other=0).to(tl.uint64, bitcast=True)
            key_at = tl.where((stripe == 15) & (kibi == num_kibis - 1), 24, stripe)
            mixed = data ^ tl.load(table + key_at + lane).to(tl.uint64, bitcast=True)[None, :]
            sums += other + (mixed & 0xFFFFFFFF) * (mixed >> 32)
        if kibi < num_kibis - 1:
            sums = (sums ^ (sums >> 47) ^ scramble) * 0x9E3779B1
    low = _merge(sums, table + 32, low_start, rows)
    high = _merge(sums, table + 40, high_start, rows)
    tl.store(out + row * 2, low.to(tl.int64, bitcast=True), mask=row < count)
    tl.store(out + row * 2 + 1, high.to(tl.int64, bitcast=True), mask=row < count)


@triton.jit
def _merge(sums, keys, start, rows: tl.constexpr):
    mixed = sums ^ tl.load(keys + tl.arange(0, 8)).to(tl.uint64, bitcast=True)[None, :]
    first, second = tl.split(tl.reshape(mixed, (rows, 4, 2)))
    folded = (first * second) ^ tl.umulhi(first, second)
    total = tl.sum(folded, axis=1) + start.to(tl.int64).to(tl.uint64, bitcast=True)
    total = (total ^ (total >> 37)) * 0x165667919E3779F9
    return total ^ (total >> 32)


def hash_blocks(words_BW: torch.Tensor, table: torch.Tensor, starts: tuple[int, int]) -> torch.Tensor:
    """int64 [blocks, words], contiguous, and block_hashes.table -> int64 [blocks, 2]."""
    count, num_words = words_BW.shape
    out = words_BW.new_empty(count, 2)
    _hash_kernel[(triton.cdiv(count, ROWS),)](words_BW, table, out, count, num_words // 128, *starts, rows=ROWS)
    return out
