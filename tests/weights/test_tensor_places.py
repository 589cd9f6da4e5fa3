"""Where copies of a loader put the elements of a tensor: views of it against the same copies made one element at a time."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moerl.weights.plan.spec_tensors import box_of
from moerl.weights.verify.places import copy_into, copy_piece, parts_of, places_of


@st.composite
def views(draw):
    """A view of a tensor, as loaders cut them."""
    shape = draw(st.sampled_from([(), (7,), (8, 6), (8, 1), (4, 6, 5), (1, 6, 4), (2, 3, 4, 5)]))
    tensor = torch.arange(torch.Size(shape).numel() + 3, dtype=torch.float32)[3:].view(shape)
    view = tensor
    for _ in range(draw(st.integers(0, 3))):
        if not view.dim():
            break
        dim = draw(st.integers(0, view.dim() - 1))
        size = view.shape[dim]
        kind = draw(st.sampled_from(["narrow", "step", "select", "transpose", "split", "flatten", "unsqueeze"]))
        if kind == "narrow" and size > 1:
            start = draw(st.integers(0, size - 1))
            view = view.narrow(dim, start, draw(st.integers(1, size - start)))
        elif kind == "step":
            view = view[(slice(None),) * dim + (slice(draw(st.integers(0, size - 1)), None, draw(st.integers(1, 3))),)]
        elif kind == "select":
            view = view.select(dim, draw(st.integers(0, size - 1)))
        elif kind == "transpose":
            view = view.transpose(dim, draw(st.integers(0, view.dim() - 1)))
        elif kind == "split" and size % 2 == 0:
            view = view.unflatten(dim, (size // 2, 2))
        elif kind == "flatten" and view.is_contiguous():
            view = view.view(-1)
        elif kind == "unsqueeze":
            view = view.unsqueeze(dim)
    return tensor, view


@st.composite
def cuts(draw, shape):
    """Boxes that make up a tensor, by where they begin."""
    edges = [sorted({0, *draw(st.lists(st.integers(1, max(1, size - 1)), max_size=2)), size} - {size} | {0}) for size in shape]
    boxes = [((), ())]
    for size, starts in zip(shape, edges, strict=True):
        ranges = list(zip(starts, [*starts[1:], size], strict=True))
        boxes = [((*start, low), (*lengths, stop - low)) for start, lengths in boxes for low, stop in ranges]
    return boxes


@given(st.data())
def test_pieces_of_a_tensor_reach_what_one_copy_of_it_would(data):
    tensor, source = data.draw(views())
    memory = torch.full((source.numel() + 5,), -1.0)
    target = memory[2 : 2 + source.numel()].view(source.shape)
    places = places_of(target, source, tensor)
    held = 0
    for start, shape in data.draw(cuts(tensor.shape)):
        piece = box_of(tensor, start, shape).clone()
        copy_piece(places, start, piece)
        parts = parts_of(places, start, piece)
        assert all(torch.equal(part.held, part.sent) and torch.equal(piece[part.place], part.held) for part in parts)
        held += sum(part.held.numel() for part in parts)
    assert torch.equal(target, source)
    assert held == source.numel()
    assert memory[:2].tolist() == [-1, -1] and memory[-3:].tolist() == [-1, -1, -1]


def test_a_share_of_rows_or_columns_is_one_place():
    tensor = torch.zeros(8, 6)
    for source in (tensor[2:4], tensor[:, 3:], tensor.t()[1:3], tensor[None, :2], tensor[1::2]):
        assert len(places_of(torch.zeros(source.shape), source, tensor)) == 1


def test_a_piece_that_is_elsewhere_has_no_part():
    places = copy_into(torch.zeros(8, 6), (2, 0), torch.ones(2, 6))
    assert parts_of(places, (4, 0), torch.ones(4, 6)) == []


def test_copies_of_parts_of_elements_are_refused():
    tensor = torch.zeros(4, 6)
    with pytest.raises(ValueError, match="parts of elements of torch.float32, as torch.uint8"):
        places_of(torch.zeros(4, 24, dtype=torch.uint8), tensor.view(torch.uint8), tensor)
