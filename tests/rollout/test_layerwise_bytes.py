"""The bytes that a loader installs later, when a layer has all of its tensors, compared with those it was given."""

import pytest
import torch

from moerl.rollout.engines.vllm.layerwise_bytes import LayerwiseBytes
from moerl.types.errors import WeightError


class Layer:
    """As vLLM: keeps its two tensors, then copies them to new memory, and that to where the kernels read, or into a packed form."""

    def __init__(self, *, packs=False, damage=lambda new, kernel: None, dtype=torch.float32):
        self.kernel, self.packs, self.damage, self.dtype = torch.zeros(6, 4, dtype=dtype), packs, damage, dtype
        self.waiting, self.packed = {}, None

    def load_weights(self, weights):
        self.waiting |= dict(weights)
        if len(self.waiting) < 2:
            return
        new = torch.empty(6, 4, dtype=self.dtype)
        for rows, name in ((slice(0, 4), "q"), (slice(4, 6), "k")):
            new[rows].copy_(self.waiting[name])
        if self.packs:
            self.packed = new.t().contiguous()
        else:
            self.kernel.data.copy_(new)
        self.damage(new, self.kernel)
        self.waiting = {}


Q, K = torch.arange(16.0).view(4, 4), torch.arange(16.0, 24.0).view(2, 4)


def load(layer, names=("q", "k")):
    installed = LayerwiseBytes(layer.load_weights)
    sent = {"q": Q, "k": K}
    for name in names:
        assert torch.equal(installed(name, sent[name]), sent[name])
    return installed


@pytest.mark.parametrize("packs", [False, True])
def test_a_layer_that_installs_what_it_was_given_passes(packs):
    load(Layer(packs=packs)).check()


def test_what_it_keeps_is_not_the_senders_memory():
    tensor = Q.clone()
    installed = LayerwiseBytes(lambda weights: None)
    kept = installed("q", tensor)
    tensor.zero_()
    assert torch.equal(kept, Q)


def damaged_kernel(new, kernel):
    kernel[5, 1] += 1


def damaged_before_packing(new, kernel):
    new[1, 1] += 1


@pytest.mark.parametrize(("layer", "name"), [(Layer(damage=damaged_kernel), "k"), (Layer(packs=True, damage=damaged_before_packing), "q")])
def test_a_byte_that_changed_is_found_where_the_kernels_read_or_before_it_is_packed(layer, name):
    with pytest.raises(WeightError, match=f"vLLM's loader changed the bytes of 1 tensors: {name}"):
        load(layer).check()


def test_what_the_kernels_read_counts_not_what_was_copied_there_from():
    load(Layer(damage=damaged_before_packing)).check()


def test_a_cast_is_found():
    with pytest.raises(WeightError, match="changed the bytes of 2 tensors"):
        load(Layer(dtype=torch.float64)).check()


def test_a_tensor_that_was_never_copied_is_named():
    with pytest.raises(WeightError, match="did not take, or not by a plain copy, 1 tensors: q"):
        load(Layer(), names=("q",)).check()


def test_a_push_that_begins_anew_forgets_the_one_before():
    installed = load(Layer(), names=("q",))
    installed.begin()
    installed.check()
