"""The bytes an engine's loader put into its model, read back under the names they came with."""

import pytest
import torch

from moerl.rollout.engines.installed_bytes import InstalledBytes
from moerl.types.errors import WeightError
from moerl.types.push import TensorSpec
from moerl.weights.installation import found_digest
from moerl.weights.plan.spec_tensors import spec_of
from moerl.weights.verify.digest import tensor_digest
from moerl.weights.verify.places import Place, parts_of


def sent(*shape):
    """A tensor in the middle of a bucket."""
    bucket = torch.arange(4096, dtype=torch.float32).view(torch.uint8)
    count = torch.Size(shape).numel()
    return bucket[256 : 256 + 4 * count].view(torch.float32).view(shape)


def loaded(load, tensor, rows=None):
    """What the model holds of `tensor`, which comes in pieces of so many `rows` if its loader takes pieces; its other elements are NaN."""
    installed = InstalledBytes(load, {"x": spec_of("x", tensor)})
    found, pieces = torch.full_like(tensor, torch.nan), tensor.split(rows or len(tensor))
    assert installed.takes_whole("x") == (rows is None)
    for number, piece in enumerate(pieces):
        start = (number * (rows or 0), *(0,) * (tensor.dim() - 1))
        places = installed("x", start, piece)
    for place in places:
        part = place.part((0,) * tensor.dim(), found)
        part.sent.copy_(part.held)
    return found


def test_a_part_of_a_fused_parameter_is_read_where_it_lies():
    fused = torch.zeros(6, 4)
    tensor = sent(2, 4)
    installed = InstalledBytes(lambda weights: [fused[2:4].copy_(weight) for _, weight in weights], {"k": spec_of("k", tensor)})
    (place,) = installed("k", (0, 0), tensor)
    assert torch.equal(place.target, tensor)
    fused[2, 1] += 1
    assert not torch.equal(place.target, tensor), "it must be the model's own memory"


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_a_rank_that_takes_a_slice_gets_it_of_every_piece(rows):
    shard, tensor = torch.zeros(4, 2), sent(4, 6)
    expected = torch.full_like(tensor, torch.nan)
    expected[:, 2:4] = tensor[:, 2:4]
    found = loaded(lambda weights: shard.data.copy_(next(iter(weights))[1].narrow(1, 2, 2)), tensor, rows)
    assert found.nan_to_num(-1).equal(expected.nan_to_num(-1))


@pytest.mark.parametrize("rows", [1, 2])
def test_a_stack_that_is_transposed_on_its_way_is_read_back_as_it_was_sent(rows):
    experts, tensor = torch.zeros(2, 4, 6), sent(2, 6, 4)

    def load(weights):
        for _, weight in weights:
            for expert, part in enumerate(weight):
                experts[expert].copy_(part.t().contiguous())

    assert torch.equal(loaded(load, tensor, rows), tensor)
    assert torch.equal(experts, tensor.transpose(1, 2))


def test_the_loader_is_asked_once_and_moves_nothing_meanwhile():
    weight, asked = torch.zeros(4, 6), []

    def load(weights):
        asked.extend(weights)
        weight.copy_(asked[-1][1])

    installed = InstalledBytes(load, {"x": TensorSpec(name="x", shape=(4, 6), dtype="float32")})
    assert not installed.takes_whole("x")
    assert torch.equal(weight, torch.zeros(4, 6))
    for row, piece in enumerate(sent(4, 6).split(1)):
        installed("x", (row, 0), piece)
    assert len(asked) == 1 and torch.equal(weight, sent(4, 6))


def test_a_loader_that_looks_at_values_gets_the_tensor_whole():
    weight, tensor = torch.zeros(4, 6), sent(4, 6)

    def load(weights):
        for _, each in weights:
            assert float(each.abs().max()) > 0
            weight.copy_(each)

    assert torch.equal(loaded(load, tensor), tensor)


def test_assignment_counts_as_a_copy():
    table, tensor = torch.zeros(8, 4), sent(5, 4)

    def load(weights):
        table[:5] = next(iter(weights))[1]

    assert torch.equal(loaded(load, tensor, 2), tensor)
    assert torch.equal(table[5:], torch.zeros(3, 4))


def test_a_cast_shows():
    half, tensor = torch.zeros(2, 600, dtype=torch.bfloat16), sent(2, 600)
    installed = InstalledBytes(lambda weights: [half.copy_(weight) for _, weight in weights], {"x": spec_of("x", tensor)})
    parts = parts_of(installed("x", (0, 0), tensor), (0, 0), tensor)
    assert found_digest(parts, tensor, tensor_digest(tensor)) != tensor_digest(tensor)


def test_a_part_in_another_dtype_is_found_though_it_rounds_to_what_was_sent():
    """Digests of a piece that is held in part are of what came with what is held in its place, which a copy would round."""
    piece = torch.arange(1, 9).bfloat16().view(4, 2)
    for more, is_found in ((0.0, False), (2**-12, True)):
        place = Place(target=piece[:2].float() * (1 + more), start=(0, 0), steps=(1, 1))
        digest = found_digest(parts_of([place], (0, 0), piece), piece, tensor_digest(piece))
        assert (digest != tensor_digest(piece)) is is_found


@pytest.mark.parametrize("load", [lambda weights: None, lambda weights: [torch.zeros(2, 4).copy_(weight * 2) for _, weight in weights]])
def test_a_loader_that_takes_nothing_or_something_else_is_refused(load):
    tensor = sent(2, 4)
    with pytest.raises(WeightError, match="took nothing of it, or not by a plain copy"):
        InstalledBytes(load, {"x": spec_of("x", tensor)})("x", (0, 0), tensor)


def test_a_parameter_that_got_nothing_is_named():
    """An output layer that the engine does not tie to the embedding, say."""
    fused, head = torch.zeros(6, 4), torch.zeros(6, 4)
    spec = TensorSpec(name="k", shape=(2, 4), dtype="float32")
    installed = InstalledBytes(lambda weights: [fused[2:4].copy_(weight) for _, weight in weights], {"k": spec})
    installed("k", (0, 0), sent(2, 4))
    installed.check_reached([("qkv", fused), ("k", fused[2:4])])
    with pytest.raises(WeightError, match=r"1 parameters of the engine's model got nothing of the push: lm_head\.weight"):
        installed.check_reached([("qkv", fused), ("lm_head.weight", head)])
    installed.begin()
    with pytest.raises(WeightError, match="qkv"):
        installed.check_reached([("qkv", fused)])
