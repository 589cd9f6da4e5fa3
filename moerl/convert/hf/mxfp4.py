"""MXFP4 of published gpt-oss checkpoints: stacks of experts in blocks of 32 values of 4 bits that share a power of two.

STACK_blocks, uint8 [experts, out, blocks, 16], holds two values a byte, the first in the low bits; STACK_scales, uint8 [experts, out,
blocks], exponents that count from -127. What they stand for is STACK [experts, in, out] (OCP Microscaling Formats, version 1.0).
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from moerl.convert.hf.hf_source import HFSource
from moerl.convert.tensors.entry import Entry
from moerl.convert.tensors.safetensors_file import read_tensor
from moerl.types.errors import Problem, problem

BLOCKS, SCALES = "_blocks", "_scales"
_BLOCK, _BIAS = 32, 127
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_POSITIVE, *(-value for value in _POSITIVE)])


def is_packed(config: Mapping[str, Any]) -> bool:
    quantization = config.get("quantization_config")
    return isinstance(quantization, Mapping) and quantization.get("quant_method") == "mxfp4"


def packed_problems(source: HFSource) -> Iterator[Problem]:
    """Every stack of values without exponents of its shape, and exponents without values."""
    for name, stored in source.tensors.items():
        if name.endswith(BLOCKS):
            scales = source.tensors.get(name.removesuffix(BLOCKS) + SCALES)
            expected = (*stored.shape[:-1], torch.uint8)
            if len(stored.shape) != 4 or stored.shape[3] * 2 != _BLOCK or stored.dtype != torch.uint8:
                rule, found = f"must be uint8 of shape (experts, out, blocks, {_BLOCK // 2})", f"found {stored.dtype} {stored.shape}"
                yield problem("SRC", f"{stored.file}: {name}", rule, found, "fetch the checkpoint again")
            elif scales is None or (*scales.shape, scales.dtype) != expected:
                found = "there is none" if scales is None else f"found {scales.dtype} {scales.shape}"
                rule = f"needs {name.removesuffix(BLOCKS)}{SCALES}, uint8 of shape {expected[:-1]}"
                yield problem("SRC", f"{stored.file}: {name}", rule, found, "fetch the checkpoint again")
        elif name.endswith(SCALES) and name.removesuffix(SCALES) + BLOCKS not in source.tensors:
            yield problem("SRC", f"{stored.file}: {name}", "has no values", "exponents mean nothing alone", "fetch the checkpoint again")


def unpacked_entry(source: HFSource, name: str, dtype: torch.dtype) -> Entry:
    """Entries of the stack whose blocks are called `name`, one expert at a time."""
    blocks, scales = source.tensors[name], source.tensors[name.removesuffix(BLOCKS) + SCALES]
    experts, out, count, _ = blocks.shape

    def pieces() -> Iterator[Tensor]:
        for expert in range(experts):
            yield unpacked(read_tensor(blocks.part(expert)), read_tensor(scales.part(expert))).T.to(dtype)

    return Entry(name=name.removesuffix(BLOCKS), dtype=dtype, shape=(experts, count * _BLOCK, out), pieces=pieces)


def unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """uint8 [..., blocks, 16] and [..., blocks] -> float32 [..., blocks * 32]."""
    values = _VALUES[torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).int()]
    return torch.ldexp(values, scales.int()[..., None] - _BIAS).flatten(-2)
