import pytest
import torch
import xxhash

from moerl.weights.verify.digest import tensor_bytes, tensor_digest

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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_digest_is_that_of_the_row_major_bytes(dtype):
    tensor = torch.arange(12).reshape(3, 4).to(dtype)
    raw = bytes(tensor.untyped_storage())
    assert tensor_digest(tensor) == xxhash.xxh3_128_hexdigest(raw)


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
    assert tensor_digest(torch.empty(0, 3)) == xxhash.xxh3_128_hexdigest(b"")


def test_a_digest_leaves_the_storage_resizable_because_it_may_have_to_leave_a_gpu():
    tensor = torch.arange(12, dtype=torch.float32)
    assert tensor_digest(tensor) == tensor_digest(tensor.clone()) != tensor_digest(tensor + 1)
    tensor.untyped_storage().resize_(0)
    assert tensor_digest(torch.empty(0)) == xxhash.xxh3_128_hexdigest(b"")
