"""The invariants that moerl/train/checkpoint/boxes.py states."""

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moerl.train.checkpoint.boxes import boxes_of_range


@st.composite
def ranges(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    start, stop = sorted(draw(st.lists(st.integers(0, prod(shape)), min_size=2, max_size=2)))
    return shape, start, stop


@given(ranges())
def test_the_boxes_of_a_range_follow_each_other_in_memory_and_cover_it_once(case):
    shape, start, stop = case
    elements = np.arange(prod(shape)).reshape(shape)
    found = [elements[tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))] for box in boxes_of_range(*case)]
    assert np.concatenate([np.empty(0, int), *(part.ravel() for part in found)]).tolist() == list(range(start, stop))


@given(ranges())
def test_there_are_few_boxes_and_none_is_empty(case):
    boxes = list(boxes_of_range(*case))
    assert len(boxes) <= 2 * len(case[0]) - 1
    assert all(prod(box.shape) > 0 and len(box.shape) == len(box.offset) == len(case[0]) for box in boxes)


def test_whole_rows_are_one_box():
    (box,) = boxes_of_range((6, 3, 2), 6, 30)
    assert (box.offset, box.shape) == ((1, 0, 0), (4, 3, 2))


@pytest.mark.parametrize("bounds", [(-1, 2), (3, 2), (0, 13)])
def test_a_range_outside_the_tensor_is_an_error(bounds):
    with pytest.raises(AssertionError, match="no range of a tensor"):
        list(boxes_of_range((3, 4), *bounds))
