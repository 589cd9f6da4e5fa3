"""What becomes of a model's memory when its server drops what a push brings."""

import gc
from functools import partial
from types import SimpleNamespace

import torch
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

from moerl.rollout.engines.dropped_weights import DroppedWeights, UnsentTensors, live_tensors
from moerl.rollout.engines.installed_bytes import memory_of


def model():
    found = torch.nn.Linear(4, 4).requires_grad_(False)
    found.register_buffer("angles", torch.arange(4.0), persistent=False)
    found.kernel = SimpleNamespace(run=partial(torch.add, torch.full((3,), 8)))
    return found


def test_weights_on_cpu_leave_their_memory_and_come_back_without_what_was_in_it():
    linear = torch.nn.Linear(4, 4).requires_grad_(False)
    rows = linear.weight[1:3]  # as checkpoints' tensors are views of what a model has
    dropped = DroppedWeights([rows, linear.bias])
    assert dropped.num_bytes == 4 * (16 + 4)
    assert linear.weight.untyped_storage().nbytes() == linear.bias.untyped_storage().nbytes() == 0
    dropped.restore()
    assert linear.weight.isnan().all() and linear.bias.isnan().all()
    rows.fill_(3)
    assert (linear.weight[1:3] == 3).all()


def test_weights_in_fp8_come_back_as_no_number():
    weight = torch.ones(4).to(torch.float8_e4m3fn)
    DroppedWeights([weight]).restore()
    assert weight.float().isnan().all()


def test_tensors_that_no_push_brings_are_what_they_were_at_the_same_addresses():
    linear = model()
    (strides,) = linear.kernel.run.args
    everything = [*linear.parameters(), linear.angles, strides]
    unsent = UnsentTensors([*everything, linear.angles[1:]], linear.parameters())
    addresses = [memory_of(tensor) for tensor in everything]
    for tensor in everything:
        tensor.fill_(-7)
    unsent.restore()
    assert sum(copy.nbytes for _, copy in unsent._kept) == linear.angles.nbytes + strides.nbytes
    assert [memory_of(tensor) for tensor in everything] == addresses
    assert torch.equal(linear.angles, torch.arange(4.0)) and (strides == 8).all()
    assert all((parameter == -7).all() for parameter in linear.parameters())


def test_tensors_are_found_whatever_holds_them():
    linear = model()
    found = {memory_of(tensor) for tensor in live_tensors()}
    assert {memory_of(tensor) for tensor in (linear.weight, linear.angles, *linear.kernel.run.args)} <= found


def test_tensors_are_found_that_the_collector_was_told_to_leave_alone():
    linear = model()
    gc.freeze()  # as vLLM does when a worker has started
    try:
        num_frozen = gc.get_freeze_count()
        found = {memory_of(tensor) for tensor in live_tensors()}
        assert gc.get_freeze_count() >= num_frozen
    finally:
        gc.unfreeze()
    assert {memory_of(tensor) for tensor in (linear.weight, linear.angles, *linear.kernel.run.args)} <= found


def test_tensors_without_memory_of_their_own_are_none():
    with FunctionalTensorMode():
        left_by_compilation = FunctionalTensor.to_functional(torch.ones(3))
    left = {id(left_by_compilation), id(left_by_compilation.elem)}
    assert left.isdisjoint(id(tensor) for tensor in live_tensors())
