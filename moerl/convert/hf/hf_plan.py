"""Plan of a Hugging Face folder in another dtype: for each tensor how to copy, cast, dequantize or quantize it piece by piece."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from moerl.config.rules.checkpoint_files import quantizer_file
from moerl.convert.hf import mxfp4
from moerl.convert.hf.hf_source import HFSource
from moerl.convert.tensors.entry import Entry
from moerl.convert.tensors.safetensors_file import StoredTensor, read_pieces, read_tensor
from moerl.models import fp8_blocks, fp8_names
from moerl.models.families.parts.family_checks import is_in_fp8_blocks
from moerl.models.fp8_names import BLOCK, is_quantized_when_published
from moerl.types.errors import ConvertError, Problem, problem

Dtype = Literal["keep", "bfloat16", "float16", "float32", "fp8"]

_ALWAYS_FLOAT32 = ("e_score_correction_bias",)
"""Ends of names. A bias of 1e-3 beside scores near 1 decides between experts, and bfloat16 has no bits for it."""
_FP8 = torch.float8_e4m3fn


def converted(source: HFSource, dtype: Dtype, scale_format: fp8_blocks.ScaleFormat) -> list[Entry]:
    """Raises ConvertError with every tensor that does not fit."""
    is_packed = mxfp4.is_packed(source.config)
    problems = list(mxfp4.packed_problems(source) if is_packed else fp8_problems(source))
    if dtype == "fp8" and is_packed:
        reason = "blocks of 128 x 128 are made of matrices, its experts are stacks"
        problems.append(problem("--dtype", dtype, "must not be fp8 for a source in MXFP4", reason, "--dtype bfloat16"))
    if dtype == "fp8" and any(stored.dtype == _FP8 for stored in source.tensors.values()):
        reason = "quantizing anew could only lose"
        problems.append(problem("--dtype", dtype, "must not be fp8 for a source in FP8", reason, "--dtype keep"))
    if problems:
        raise ConvertError(problems)
    if dtype == "keep":
        return [source.entry(name) for name in source.tensors]
    if is_packed:
        return [_unpacked(source, name, getattr(torch, dtype)) for name in source.tensors if not name.endswith(mxfp4.SCALES)]
    return [entry for name in source.tensors for entry in _converted(source, name, dtype, scale_format)]


def _unpacked(source: HFSource, name: str, dtype: torch.dtype) -> Entry:
    return mxfp4.unpacked_entry(source, name, dtype) if name.endswith(mxfp4.BLOCKS) else plain_entry(source, name, dtype)


def plain_entry(source: HFSource, name: str, dtype: torch.dtype) -> Entry:
    """The tensor in `dtype`, dequantized if it is FP8; biases that routers need in float32 stay so."""
    stored = source.tensors[name]
    if stored.dtype == _FP8:
        scales = source.tensors[name + fp8_names.SCALE_SUFFIX]
        return Entry(name=name, dtype=dtype, shape=stored.shape, pieces=partial(_dequantized, stored, scales, dtype))
    if not stored.dtype.is_floating_point or stored.dtype == dtype or name.endswith(_ALWAYS_FLOAT32):
        return source.entry(name)
    return Entry(name=name, dtype=dtype, shape=stored.shape, pieces=partial(_cast, stored, dtype))


def without_fp8(source: HFSource, name: str, dtype: torch.dtype) -> Entry:
    """The tensor in its own dtype; in `dtype` if that is FP8, whose values are products with scales."""
    return plain_entry(source, name, dtype) if source.tensors[name].dtype == _FP8 else source.entry(name)


def is_scale(source: HFSource, name: str) -> bool:
    return name.endswith(fp8_names.SCALE_SUFFIX) and name.removesuffix(fp8_names.SCALE_SUFFIX) in source.tensors


def fp8_problems(source: HFSource) -> Iterator[Problem]:
    """Every FP8 weight without scales of its shape, every scale without its weight, and quantization of another kind."""
    config = source.config.get("quantization_config")
    if config is not None and not isinstance(config, Mapping):
        reason = "it says how the weights are quantized"
        yield problem("SRC/config.json: quantization_config", config, "must be an object or null", reason, "fetch config.json again")
        return
    if config is None and (file := quantizer_file(source.directory)) is not None:
        reason = f"it is of a quantizer whose weights have another form; moerl reads FP8 in blocks of {BLOCK} x {BLOCK}"
        yield problem("SRC", str(file), "must not be quantized", reason, "the unquantized checkpoint")
        return
    if config is not None and not is_in_fp8_blocks(source.config):
        found: object = {name: config.get(name) for name in ("quant_method", "weight_block_size")}
        reason = f"moerl reads FP8 in blocks of {BLOCK} x {BLOCK}, and copies nothing it cannot check"
        fix = "moerl convert SRC DST --dtype bfloat16, then that folder" if mxfp4.is_packed(source.config) else "the unquantized checkpoint"
        yield problem("SRC/config.json: quantization_config", found, "must be fp8 in blocks", reason, fix)
        return
    for name, stored in source.tensors.items():
        if stored.dtype == _FP8:
            yield from _scale_problems(source, name, stored)
        elif name.endswith(fp8_names.SCALE_SUFFIX):
            weight = source.tensors.get(name.removesuffix(fp8_names.SCALE_SUFFIX))
            if weight is None or weight.dtype != _FP8:
                found = "no tensor" if weight is None else str(weight.dtype)
                reason = f"a scale belongs to a weight in float8_e4m3fn, found {found}"
                yield problem("SRC", f"{stored.file}: {name}", "has no FP8 weight", reason, "fetch the checkpoint again")


def _scale_problems(source: HFSource, name: str, stored: StoredTensor) -> Iterator[Problem]:
    scales = source.tensors.get(name + fp8_names.SCALE_SUFFIX)
    if len(stored.shape) != 2:
        reason = f"blocks are of matrices, this has shape {stored.shape}"
        yield problem("SRC", f"{stored.file}: {name}", "must have two axes", reason, "another checkpoint")
    elif scales is None:
        reason = "FP8 values mean nothing without"
        yield problem("SRC", f"{stored.file}: {name}", f"needs {name}{fp8_names.SCALE_SUFFIX}", reason, "fetch the checkpoint again")
    elif scales.shape != fp8_names.scale_shape(stored.shape) or scales.dtype not in fp8_blocks.SCALE_DTYPES:
        rule = f"must have shape {fp8_names.scale_shape(stored.shape)} in {fp8_blocks.SCALE_NAMES}"
        reason = f"found {scales.shape} in {scales.dtype}; the weight has shape {stored.shape}"
        yield problem("SRC", f"{scales.file}: {name}{fp8_names.SCALE_SUFFIX}", rule, reason, "fetch the checkpoint again")


def _converted(source: HFSource, name: str, dtype: Dtype, scale_format: fp8_blocks.ScaleFormat) -> list[Entry]:
    stored = source.tensors[name]
    if dtype != "fp8":
        return [] if is_scale(source, name) else [plain_entry(source, name, getattr(torch, dtype))]
    if is_quantized_when_published(name, stored.shape) and stored.dtype.is_floating_point:
        return _quantized(name, stored, scale_format)
    return [plain_entry(source, name, torch.bfloat16)]


def _quantized(name: str, stored: StoredTensor, scale_format: fp8_blocks.ScaleFormat) -> list[Entry]:
    """The weight, then its scales: they are left by the weight's pieces, or computed anew when that is in another file."""
    left: list[Tensor] = []

    def weight() -> Iterator[Tensor]:
        scales = []
        for rows in read_pieces(stored, row_multiple=BLOCK):
            values, part = fp8_blocks.quantized(rows, scale_format)
            scales.append(part)
            yield values
        left[:] = [torch.cat(scales)]

    def scales() -> Iterator[Tensor]:
        for _ in weight() if not left else ():
            pass
        yield left.pop()

    return [
        Entry(name=name, dtype=_FP8, shape=stored.shape, pieces=weight),
        Entry(name=name + fp8_names.SCALE_SUFFIX, dtype=torch.float32, shape=fp8_names.scale_shape(stored.shape), pieces=scales),
    ]


def _dequantized(stored: StoredTensor, scales: StoredTensor, dtype: torch.dtype) -> Iterator[Tensor]:
    factors, row = read_tensor(scales).float(), 0
    for rows in read_pieces(stored, row_multiple=BLOCK):
        blocks = -(-len(rows) // BLOCK)
        yield from fp8_blocks.dequantized(rows, factors[row : row + blocks], dtype)
        row += blocks


def _cast(stored: StoredTensor, dtype: torch.dtype) -> Iterator[Tensor]:
    return (piece.to(dtype) for piece in read_pieces(stored))


def config_for(config: Mapping[str, Any], dtype: Dtype, scale_format: fp8_blocks.ScaleFormat, kept: list[str]) -> dict[str, Any]:
    """config.json after the conversion. `kept`: modules with a matrix that an FP8 checkpoint keeps in bfloat16."""
    if dtype == "keep":
        return dict(config)
    plain: dict[str, Any] = {name: value for name, value in config.items() if name not in ("quantization_config", "torch_dtype", "dtype")}
    key = "dtype" if "dtype" in config and "torch_dtype" not in config else "torch_dtype"  # the name since transformers 5
    plain[key] = "bfloat16" if dtype == "fp8" else dtype
    if dtype != "fp8":
        return plain
    quantization = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": kept,
    }
    return plain | {"quantization_config": quantization | ({"scale_fmt": "ue8m0"} if scale_format == "ue8m0" else {})}
