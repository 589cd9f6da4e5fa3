"""The bytes that a loader installs later, when a layer has all of its tensors, compared with those it was given."""

import pytest
import torch

from moerl.rollout.engines.vllm.layerwise_bytes import LayerwiseBytes
from moerl.weights.installation import found_digest
from moerl.weights.verify.digest import tensor_digest
from moerl.weights.verify.places import parts_of


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


SENT = {"q": Q, "k": K}


def load(layer, names=("q", "k"), sent=SENT):
    """Tensors that were not installed as they were sent, of those that were installed."""
    found = {}

    def verify(name, places):
        parts = parts_of(places, (0, 0), sent[name])
        found[name] = found_digest(parts, sent[name], tensor_digest(sent[name])) == tensor_digest(sent[name])

    installed = LayerwiseBytes(layer.load_weights, verify)
    for name in names:
        assert installed(name, sent[name]) is None, "it is kept"
    return found


@pytest.mark.parametrize("packs", [False, True])
def test_a_layer_that_installs_what_it_was_given_passes(packs):
    assert load(Layer(packs=packs)) == {"q": True, "k": True}


def damaged_kernel(new, kernel):
    kernel[5, 1] += 1


def damaged_before_packing(new, kernel):
    new[1, 1] += 1


@pytest.mark.parametrize(("layer", "name"), [(Layer(damage=damaged_kernel), "k"), (Layer(packs=True, damage=damaged_before_packing), "q")])
def test_a_byte_that_changed_is_found_where_the_kernels_read_or_before_it_is_packed(layer, name):
    assert load(layer) == {"q": name != "q", "k": name != "k"}


def test_what_the_kernels_read_counts_not_what_was_copied_there_from():
    assert load(Layer(damage=damaged_before_packing)) == {"q": True, "k": True}


def damaged_beyond_sixteen_bits(new, kernel):
    kernel[5, 1] *= 1 + 2**-12


@pytest.mark.parametrize("packs", [False, True])
def test_numbers_of_sixteen_bits_that_the_engine_holds_in_float32_pass(packs):
    assert load(Layer(packs=packs), sent={name: tensor.bfloat16() for name, tensor in SENT.items()}) == {"q": True, "k": True}


def test_other_values_than_numbers_of_sixteen_bits_have_are_found():
    found = load(Layer(damage=damaged_beyond_sixteen_bits), sent={name: tensor.bfloat16() for name, tensor in SENT.items()})
    assert found == {"q": True, "k": False}


def test_a_cast_is_found():
    assert load(Layer(dtype=torch.float64)) == {"q": False, "k": False}


def test_a_tensor_that_was_never_copied_is_not_told():
    assert load(Layer(), names=("q",)) == {}


def test_a_push_that_begins_anew_forgets_the_one_before():
    told, layer = [], Layer()
    installed = LayerwiseBytes(layer.load_weights, lambda name, places: told.append(name))
    installed("q", Q)
    installed.begin()
    installed("k", K)
    assert told == ["k"]
