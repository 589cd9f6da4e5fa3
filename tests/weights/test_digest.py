import importlib.util
import os
import subprocess
import sys

import pytest
import torch
import xxhash

from moerl.weights.verify.digest import BLOCK_BYTES, halves_on_device, hex_digests, tensor_bytes, tensor_digest

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int8,
    torch.bool,
]


def expected(raw: bytes) -> str:
    """As digest.py says it, block by block and last block first."""
    low = high = 0
    for block in reversed(range(-(-len(raw) // BLOCK_BYTES))):
        part = raw[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        found = xxhash.xxh3_128_intdigest(part.ljust(-(-len(part) // 1024) * 1024, b"\0"))
        low, high = low + (2 * block + 1) * found, high + (2 * block + 1) * (found >> 64)
    return f"{high % 2**64:016x}{low % 2**64:016x}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_digest_is_that_of_the_row_major_bytes(dtype):
    tensor = torch.arange(12).reshape(3, 4).to(dtype)
    raw = bytes(tensor.untyped_storage())
    assert tensor_digest(tensor) == expected(raw)


SIZES = (0, 1, 1023, 1024, 1025, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 5000)


def drawn(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


@pytest.mark.parametrize("size", SIZES)
def test_what_a_device_computes_is_what_the_host_does(size):
    """The same operators that a GPU without Triton runs."""
    data = drawn(size)
    assert hex_digests([halves_on_device(data)]) == [tensor_digest(data)] == [expected(bytes(data.tolist()))]


KERNEL = """
import torch
from moerl.weights.verify.block_hashes import starts, table
from moerl.weights.verify.block_kernel import ROWS, hash_blocks
for blocks, kibis in ((1, 1), (ROWS + 3, 2), (2, 64)):
    generator = torch.Generator().manual_seed(blocks)
    rows = torch.randint(0, 256, (blocks, kibis * 1024), dtype=torch.uint8, generator=generator)
    found = hash_blocks(rows.view(torch.int64), table(rows.device), starts(kibis * 1024)).tolist()
    assert [(high % 2**64) << 64 | low % 2**64 for low, high in found] == [xxhash.xxh3_128_intdigest(bytes(row.tolist())) for row in rows]
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton here")
def test_the_kernel_gives_every_block_the_hash_of_the_package():
    """Triton's interpreter runs what a GPU would; it is chosen before Triton is imported."""
    command = [sys.executable, "-c", f"import xxhash{KERNEL}"]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from moerl.weights.verify.block_kernel import ROWS, _hash_kernel
types = {"words": "*i64", "table": "*i64", "out": "*i64", "count": "i32", "num_kibis": "i32", "low_start": "i64", "high_start": "i64"}
for capability in (90, 100):
    source = ASTSource(fn=_hash_kernel, signature=types | {"rows": "constexpr"}, constexprs={"rows": ROWS})
    assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton here")
def test_the_kernel_compiles_for_hopper_and_blackwell(tmp_path):
    """By Triton's own compiler and NVIDIA's assembler, which is in its wheel: neither asks for a GPU."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("start", [1, 2, 4])
def test_a_view_that_begins_within_a_word_of_its_memory_has_its_digest(start):
    data = drawn(2 * BLOCK_BYTES)[start:]
    assert hex_digests([halves_on_device(data)]) == [tensor_digest(data)]


def test_blocks_that_change_places_change_the_digest():
    data = drawn(2 * BLOCK_BYTES)
    assert tensor_digest(torch.cat([data[BLOCK_BYTES:], data[:BLOCK_BYTES]])) != tensor_digest(data)


def test_digest_of_a_strided_view_is_that_of_its_contiguous_copy():
    tensor = torch.arange(60, dtype=torch.bfloat16).reshape(3, 4, 5)
    view = tensor.permute(2, 0, 1)[1:, ::2]
    assert not view.is_contiguous()
    assert tensor_digest(view) == tensor_digest(view.contiguous()) != tensor_digest(tensor)


def test_one_flipped_bit_changes_the_digest():
    tensor = torch.zeros(1000)
    before = tensor_digest(tensor)
    tensor.view(torch.uint8)[1777] ^= 64
    assert tensor_digest(tensor) != before


def test_contiguous_memory_is_not_copied():
    tensor = torch.arange(20.0).reshape(4, 5)
    assert tensor_bytes(tensor).data_ptr() == tensor.data_ptr()
    assert tensor_bytes(tensor[2:]).data_ptr() == tensor[2:].data_ptr()


def test_scalars_empty_tensors_and_parameters_have_a_digest():
    assert tensor_digest(torch.nn.Parameter(torch.tensor(1.5))) == tensor_digest(torch.tensor([1.5]))
    assert tensor_digest(torch.empty(0, 3)) == "0" * 32


def test_a_digest_leaves_the_storage_resizable_because_it_may_have_to_leave_a_gpu():
    tensor = torch.arange(12, dtype=torch.float32)
    assert tensor_digest(tensor) == tensor_digest(tensor.clone()) != tensor_digest(tensor + 1)
    tensor.untyped_storage().resize_(0)
    assert tensor_digest(torch.empty(0)) == "0" * 32
