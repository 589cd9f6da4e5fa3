"""What a model process does with tensors of which it holds a share, by tensor parallelism, or of which every piece comes by itself."""

import asyncio
from dataclasses import replace

import pytest
import torch
from session_process import EngineProcess, Source, first_push

from moerl.rollout.engines.installed_bytes import InstalledBytes
from moerl.types.errors import WeightError
from moerl.types.push import TensorSpec
from moerl.weights import installation
from moerl.weights.installation import Loader
from moerl.weights.plan.spec_tensors import box_of, spec_of
from moerl.weights.sync import WeightSync
from moerl.weights.weight_session import WeightSession

CUTS = {"q": 0, "o": 1, "norm": None}
"""Axis that tensor parallelism cuts, as Megatron's bridge tells it."""
MODEL = {"q": torch.randn(512, 512), "o": torch.randn(384, 1024), "norm": torch.randn(512)}
MIB = 2**20


class Cut(Source):
    """A trainer that tells along which axis tensor parallelism cuts, or not."""

    def __init__(self, cuts):
        super().__init__(MODEL, bucket_bytes=2**18)
        self._cuts = cuts

    async def outline(self):
        found = await super().outline()
        return replace(found, tensors=[replace(tensor, cut_dim=self._cuts.get(tensor.name)) for tensor in found.tensors])


@pytest.fixture
def source(request):
    source = Cut(request.param)
    yield source
    source.close()


class Shard:
    """One of two tensor-parallel processes, whose loader cuts whole tensors as those of engines do. `ends`: of its share of what is cut, in
    parts of the axis. `flips`: a tensor of which it changes a bit."""

    def __init__(self, ends, flips=""):
        self.ends, self.flips = ends, flips
        self.held = {name: torch.zeros_like(self.share(name, tensor)) for name, tensor in MODEL.items()}
        specs = {name: spec_of(name, tensor) for name, tensor in MODEL.items()}
        self.bytes = InstalledBytes(self.load_weights, specs)
        self.session = WeightSession(specs, Loader(load=self.load, takes_whole=self.bytes.takes_whole))

    def share(self, name, tensor):
        dim = CUTS[name]
        if dim is None:
            return tensor
        first, stop = (round(end * tensor.shape[dim]) for end in self.ends)
        return tensor.narrow(dim, first, stop - first)

    def load_weights(self, weights):
        for name, tensor in weights:
            self.held[name].copy_(self.share(name, tensor))

    def load(self, name, start, piece):
        places = self.bytes(name, start, piece)
        if name == self.flips:
            self.held[name].view(torch.uint8)[..., -1] ^= 1
        return places

    def push(self, source, manifest, offer, damaged=None):
        """`damaged`: an element of "q" of which a bit is flipped in its bucket."""
        self.session.begin(manifest)
        for bucket in offer.buckets:
            data = source.sender.pack(bucket.index)
            for entry in bucket.entries if damaged is not None else ():
                whole = torch.zeros(MODEL[entry.name].shape, dtype=torch.int64)
                if entry.name == "q":
                    whole[damaged] = 1
                bits = box_of(whole, entry.start, entry.shape).flatten()
                data[entry.offset : entry.offset + entry.num_bytes].view(torch.int32).bitwise_xor_(bits.int())
            self.session._incoming = _Given(bucket, data)
            self.session.install()
        self.session.finish(manifest.version)


class _Given:
    def __init__(self, bucket, data):
        self._given = bucket, data

    def buckets(self):
        yield self._given

    def rest(self):
        pass

    def close(self):
        pass


HALVES = ((0, 1 / 2), (1 / 2, 1))
NONE = {}
"""Of cuts: pieces are of whole rows, and a share of columns has a part of each."""


@pytest.mark.parametrize("source", [CUTS], indirect=True)
@pytest.mark.parametrize("ends", HALVES)
def test_a_process_reads_its_own_share_once_for_digests_and_nothing_else(source, ends, monkeypatch):
    read, digest = [], installation.tensor_digest
    monkeypatch.setattr(installation, "tensor_digest", lambda tensor: read.append(tensor.nbytes) or digest(tensor))
    monkeypatch.setattr(installation, "_same_bytes", lambda held, sent: pytest.fail("it holds a part of a piece"))
    manifest, offer = first_push(source, processes=2)
    shard = Shard(ends)
    shard.push(source, manifest, offer)
    assert sum(read) == sum(tensor.nbytes for tensor in shard.held.values())
    assert all(torch.equal(held, shard.share(name, MODEL[name])) for name, held in shard.held.items())


@pytest.mark.parametrize("source", [CUTS, NONE], indirect=True)
@pytest.mark.parametrize("ends", [*HALVES, (1 / 8, 5 / 8)])
def test_a_share_holds_what_was_sent_however_pieces_are_cut(source, ends):
    shard = Shard(ends)
    shard.push(source, *first_push(source, processes=2))
    assert all(torch.equal(held, shard.share(name, MODEL[name])) for name, held in shard.held.items())


@pytest.mark.parametrize("source", [CUTS, NONE], indirect=True)
@pytest.mark.parametrize("flips", CUTS)
def test_a_loader_that_changes_its_share_is_found(source, flips):
    manifest, offer = first_push(source, processes=2)
    with pytest.raises(WeightError, match=f"'{flips}'.*installed bytes have digest.*the engine's loader changed them"):
        Shard(HALVES[1], flips).push(source, manifest, offer)


@pytest.mark.parametrize("source", [CUTS, NONE], indirect=True)
def test_a_bit_flipped_on_the_way_is_found_by_who_holds_it(source):
    manifest, offer = first_push(source, processes=2)
    Shard(HALVES[0]).push(source, manifest, offer, damaged=(511, 0))
    with pytest.raises(WeightError, match="'q'.*bytes damaged on the way from the trainer's ranks"):
        Shard(HALVES[1]).push(source, manifest, offer, damaged=(511, 0))


@pytest.mark.parametrize("source", [NONE], indirect=True)
def test_a_bit_flipped_on_the_way_is_found_in_a_piece_of_which_a_part_is_held(source):
    manifest, offer = first_push(source, processes=2)
    for element in ((100, 0), (60, 0)):  # in the same piece: in its share and before it
        with pytest.raises(WeightError, match="'q'.*bytes damaged on the way from the trainer's ranks"):
            Shard((1 / 6, 1)).push(source, manifest, offer, damaged=element)


@pytest.mark.parametrize(("takes_whole", "least", "most"), [(False, 0, 8 * MIB), (True, 40 * MIB, 64 * MIB)])
def test_a_tensor_that_comes_in_pieces_takes_no_memory_beside_the_model(takes_whole, least, most):
    """48 MiB of it, in buckets of 1 MiB, in a process of its own."""
    model = {"embed.weight": torch.ones(12 * MIB // 1024, 1024)}
    source = Source(model, bucket_bytes=MIB)
    specs = {"embed.weight": TensorSpec(name="embed.weight", shape=(12 * MIB // 1024, 1024), dtype="float32")}
    process = EngineProcess(specs=specs, takes_whole=takes_whole)

    async def pushes():
        sync = WeightSync(source, {"server": process}, transport="ipc")
        await sync.push(1)
        process.call("forget_peak")
        await sync.push(2)
        return process.call("growth")

    try:
        assert least <= asyncio.run(pushes()) <= most
    finally:
        process.close()
        source.close()
