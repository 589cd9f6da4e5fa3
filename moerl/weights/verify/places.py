"""Where a model holds the elements of a tensor, so that any piece of it can be copied there, and compared there with what was sent.

An engine holds a range of a tensor along some of its axes, or every n-th of an axis, in views of its parameters, which may have the axes in
another order. The model's memory is never gathered for a comparison: each view is compared where it lies.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from moerl.weights.plan.spec_tensors import box_of

Start = tuple[int, ...]
"""Where a piece begins in its tensor, along every axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Elements of a tensor in the model's memory."""

    target: torch.Tensor
    """A view with the axes of the tensor, in their order."""
    start: Start
    """Index of its first element in the tensor."""
    steps: tuple[int, ...]
    """From one of its elements to the next in the tensor, along every axis."""

    def part(self, start: Start, piece: torch.Tensor) -> "Part | None":
        """Elements that it has of the piece that begins at `start` in the tensor; None: nothing."""
        held, sent = [], []
        for first, step, size, begin, length in zip(self.start, self.steps, self.target.shape, start, piece.shape, strict=True):
            low, stop = max(0, -(-(begin - first) // step)), min(size, -(-(begin + length - first) // step))
            if low >= stop:
                return None
            held.append(slice(low, stop))
            sent.append(slice(first + low * step - begin, first + (stop - 1) * step - begin + 1, step))
        return Part(held=self.target[tuple(held)], sent=piece[tuple(sent)], place=tuple(sent))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Elements of a piece that are in one place."""

    held: torch.Tensor
    """The model's memory."""
    sent: torch.Tensor
    """The same elements of the piece, as it came."""
    place: tuple[slice, ...]
    """Where in the piece."""


def parts_of(places: Iterable[Place], start: Start, piece: torch.Tensor) -> list[Part]:
    """Parts of the piece that begins at `start` in the tensor."""
    return [part for place in places if (part := place.part(start, piece)) is not None]


def copy_piece(places: Iterable[Place], start: Start, piece: torch.Tensor) -> None:
    """Copies to each of the places what it has of the piece that begins at `start`."""
    for part in parts_of(places, start, piece):
        part.held.copy_(part.sent)


def place_of_all(view: torch.Tensor) -> Place:
    """Place of a `view` that holds a whole tensor."""
    return Place(target=view, start=(0,) * view.dim(), steps=(1,) * view.dim())


def copy_into(view: torch.Tensor, start: Start, piece: torch.Tensor) -> list[Place]:
    """Copies a piece to where it belongs in a `view` that holds the whole tensor."""
    target = box_of(view, start, piece.shape)
    target.copy_(piece)
    return [Place(target=target, start=start, steps=(1,) * view.dim())]


def places_of(target: torch.Tensor, source: torch.Tensor, tensor: torch.Tensor) -> list[Place]:
    """Places of the copy of `source`, a view of the contiguous `tensor`, to `target`, which has as many elements."""
    if source.element_size() != tensor.element_size():
        raise ValueError(f"the engine's loader copies parts of elements of {tensor.dtype}, as {source.dtype}")
    places = list(_places(target.view(source.shape), source, tensor))
    assert sum(place.target.numel() for place in places) == source.numel()
    return places


def _places(target: torch.Tensor, source: torch.Tensor, tensor: torch.Tensor) -> Iterator[Place]:
    """Several where one dimension of `source` runs over two axes of the tensor, or two over one (heads of interleaved projections)."""
    if not source.numel():
        return
    if (found := _place(target, source, tensor)) is not None:
        yield found
    elif source.dim() == 1:
        while len(source):
            count = _until_edge(source, tensor)
            yield from _places(target[:count], source[:count], tensor)
            target, source = target[count:], source[count:]
    else:
        for each_target, each_source in zip(target, source, strict=True):
            yield from _places(each_target, each_source, tensor)


def _place(target: torch.Tensor, source: torch.Tensor, tensor: torch.Tensor) -> Place | None:
    """None: a dimension of `source` is not one range of one axis."""
    start, left = [], source.storage_offset() - tensor.storage_offset()
    for stride in tensor.stride():
        start.append(left // max(stride, 1))
        left -= start[-1] * stride
    steps, order = [1] * tensor.dim(), [-1] * tensor.dim()
    for dim, (size, stride) in enumerate(zip(source.shape, source.stride(), strict=True)):
        if size == 1:
            continue
        axis = _axis(stride, tensor)
        if axis is None or order[axis] >= 0:
            return None
        steps[axis], order[axis] = stride // tensor.stride(axis), dim
        if start[axis] + steps[axis] * (size - 1) >= tensor.shape[axis]:
            return None
    sizes = [1 if dim < 0 else source.shape[dim] for dim in order]
    view = target.as_strided(sizes, [1 if dim < 0 else target.stride(dim) for dim in order], target.storage_offset())
    return Place(target=view, start=tuple(start), steps=tuple(steps))


def _axis(stride: int, tensor: torch.Tensor) -> int | None:
    """The axis of the contiguous `tensor` along which `stride` leads."""
    for axis, (own, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and own <= stride < own * size:
            return axis if stride % own == 0 else None
    return None


def _until_edge(source: torch.Tensor, tensor: torch.Tensor) -> int:
    """Elements of the one-dimensional `source` before it leaves its axis of `tensor`; at least one."""
    axis, stride = _axis(source.stride(0), tensor), source.stride(0)
    if axis is None:
        return 1
    offset = source.storage_offset() - tensor.storage_offset()
    end = tensor.stride(axis) * tensor.shape[axis]
    return max(1, min(len(source), -(-(end - offset % end) // stride)))
