"""The bytes an engine's loader put into its model, read back under the names they came with."""

import pytest
import torch

from moerl.rollout.engines.installed_bytes import InstalledBytes
from moerl.types.errors import WeightError


def sent(*shape):
    """A tensor in the middle of a bucket."""
    bucket = torch.arange(4096, dtype=torch.float32).view(torch.uint8)
    count = torch.Size(shape).numel()
    return bucket[256 : 256 + 4 * count].view(torch.float32).view(shape)


def test_a_part_of_a_fused_parameter_is_read_where_it_lies():
    fused = torch.zeros(6, 4)
    tensor = sent(2, 4)
    installed = InstalledBytes(lambda weights: [fused[2:4].copy_(weight) for _, weight in weights])("k", tensor)
    assert torch.equal(installed, tensor)
    fused[2, 1] += 1
    assert not torch.equal(installed, tensor), "it must be the model's own memory"


def test_a_rank_that_takes_a_slice_reads_the_slice_back():
    shard, tensor = torch.zeros(4, 2), sent(4, 6)

    def load(weights):
        shard.data.copy_(next(iter(weights))[1].narrow(1, 2, 2))
        shard[3, 1] = -1.0  # what a faulty loader would do

    installed = InstalledBytes(load)("o", tensor)
    expected = tensor.clone()
    expected[3, 3] = -1.0
    assert torch.equal(installed, expected)


def test_a_tensor_that_was_transposed_on_its_way_is_read_back_as_it_was_sent():
    experts, tensor = torch.zeros(2, 4, 6), sent(2, 6, 4)

    def load(weights):
        for _, weight in weights:
            for expert, part in enumerate(weight):
                experts[expert].copy_(part.t().contiguous())
        experts[1, 3, 5] = -1.0  # what a faulty loader would do

    expected = tensor.clone()
    expected[1, 5, 3] = -1.0
    assert torch.equal(InstalledBytes(load)("experts", tensor), expected)


def test_assignment_counts_as_a_copy():
    table, tensor = torch.zeros(8, 4), sent(5, 4)

    def load(weights):
        table[:5] = next(iter(weights))[1]

    assert torch.equal(InstalledBytes(load)("embedding", tensor), tensor)


def test_a_cast_shows():
    half, tensor = torch.zeros(2, 600, dtype=torch.bfloat16), sent(2, 600)
    installed = InstalledBytes(lambda weights: [half.copy_(weight) for _, weight in weights])("x", tensor)
    assert installed.dtype != tensor.dtype or not torch.equal(installed, tensor)


@pytest.mark.parametrize("load", [lambda weights: None, lambda weights: [torch.zeros(2, 4).copy_(weight * 2) for _, weight in weights]])
def test_a_loader_that_takes_nothing_or_something_else_is_refused(load):
    with pytest.raises(WeightError, match="took nothing of it, or not by a plain copy"):
        InstalledBytes(load)("x", sent(2, 4))


def test_a_parameter_that_got_nothing_is_named():
    """An output layer that the engine does not tie to the embedding, say."""
    fused, head = torch.zeros(6, 4), torch.zeros(6, 4)
    installed = InstalledBytes(lambda weights: [fused[2:4].copy_(weight) for _, weight in weights])
    installed("k", sent(2, 4))
    installed.check_reached([("qkv", fused), ("k", fused[2:4])])
    with pytest.raises(WeightError, match=r"1 parameters of the engine's model got nothing of the push: lm_head\.weight"):
        installed.check_reached([("qkv", fused), ("lm_head.weight", head)])
    installed.begin()
    with pytest.raises(WeightError, match="qkv"):
        installed.check_reached([("qkv", fused)])
