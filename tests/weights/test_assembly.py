"""Tensors that come in pieces, on a device that has no memory for all of them. Without a GPU the device is torch's meta."""

import torch

from moerl.types.push import TensorSpec
from moerl.weights.installation import Assembly
from moerl.weights.plan.spec_tensors import CPU

DEVICE = torch.device("meta")


def spec(num_bytes: int) -> TensorSpec:
    return TensorSpec(name="a", shape=(num_bytes // 2,), dtype="bfloat16")


def test_a_device_lends_no_more_than_its_share_and_what_was_installed_makes_room():
    assembly = Assembly(device_bytes=100)
    first, second = assembly.empty(spec(60), DEVICE), assembly.empty(spec(40), DEVICE)
    assert first.device == second.device == DEVICE
    assert assembly.empty(spec(2), DEVICE).device == CPU
    assembly.free(first)
    assert assembly.empty(spec(62), DEVICE).device == CPU
    assert assembly.empty(spec(60), DEVICE).device == DEVICE


def test_what_waits_in_host_memory_takes_nothing_of_the_share():
    assembly = Assembly(device_bytes=100)
    assembly.free(assembly.empty(spec(102), DEVICE))
    assert assembly.empty(spec(100), CPU).device == CPU
    assert assembly.empty(spec(100), DEVICE).device == DEVICE
    assert assembly.empty(spec(2), DEVICE).device == CPU


def test_the_memory_is_the_tensors():
    whole = Assembly().empty(TensorSpec(name="a", shape=(3, 5), dtype="float32"), CPU)
    assert (whole.shape, whole.dtype) == ((3, 5), torch.float32)
