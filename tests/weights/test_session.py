from dataclasses import replace
from functools import partial

import pytest
import torch
from session_process import MODEL, SPECS, Engine, Source, first_push

from moerl.types.errors import WeightError
from moerl.types.push import Manifest, Piece, TensorSpec
from moerl.weights import installation, send
from moerl.weights.installation import Loader
from moerl.weights.plan.buckets import ALIGNMENT
from moerl.weights.plan.spec_tensors import box_of
from moerl.weights.transport.shared_memory import SharedReader
from moerl.weights.verify.digest import tensor_digest
from moerl.weights.verify.places import copy_into, place_of_all

PIECES = {
    name: (Piece(start=(0,) * tensor.dim(), shape=tuple(tensor.shape), ranks=(0,), digest=tensor_digest(tensor)),)
    for name, tensor in MODEL.items()
}
MANIFEST = Manifest(version=4, tensors=tuple(SPECS.values()), pieces=PIECES)


@pytest.fixture
def source():
    source = Source(bucket_bytes=2**20)
    yield source
    source.close()


@pytest.fixture
def bucket(source):
    """All tensors, also the experts', which have a bucket of their own."""
    manifest, offer = first_push(source, version=4)
    assert manifest.pieces == PIECES
    experts, others = offer.buckets
    start = -(-experts.num_bytes // ALIGNMENT) * ALIGNMENT
    moved = tuple(replace(entry, offset=start + entry.offset) for entry in others.entries)
    whole = replace(experts, num_bytes=start + others.num_bytes, entries=(*experts.entries, *moved))
    source.sender._job = (whole,)
    source.sender.pack(0)
    return whole


def without(bucket, name):
    return replace(bucket, entries=tuple(entry for entry in bucket.entries if entry.name != name))


class Given:
    """Buckets that have come, with the memory that a sender packed them into."""

    def __init__(self, source, *buckets):
        self.source, self.given = source, buckets

    def buckets(self):
        return ((bucket, self.source.sender._buffers[bucket.index % 2].reserve(0)[: bucket.num_bytes]) for bucket in self.given)

    def rest(self):
        pass

    def close(self):
        pass


@pytest.fixture
def install(source):
    """Makes a session install these buckets."""

    def install_those(engine, *buckets):
        engine.session._incoming = Given(source, *buckets)
        engine.session.install()

    return install_those


def test_every_byte_is_read_once_for_its_digest_by_who_sends_it_and_by_who_installed_it(source, install, bucket, monkeypatch):
    read = {"sent": 0, "installed": 0}
    halves, digest = send.digest_halves, installation.tensor_digest

    def counting(side, function, tensor):
        read[side] += tensor.nbytes
        return function(tensor)

    monkeypatch.setattr(send, "digest_halves", partial(counting, "sent", halves))
    monkeypatch.setattr(installation, "tensor_digest", partial(counting, "installed", digest))
    num_bytes = sum(tensor.nbytes for tensor in MODEL.values())
    source.sender._job = (bucket, replace(bucket, index=1))  # to two nodes
    source.sender.digests()
    engine = Engine()
    engine.session.begin(MANIFEST)
    install(engine, bucket)
    engine.session.finish(4)
    assert read == {"sent": num_bytes, "installed": num_bytes}


def test_a_push_installs_every_tensor_and_its_version(install, bucket):
    engine = Engine()
    engine.session.begin(MANIFEST)
    install(engine, bucket)
    engine.session.finish(4)
    assert engine.session._last.version == 4
    assert engine.digests() == {name: piece.digest for name, (piece,) in PIECES.items()}


def changed(**fields):
    return tuple(replace(spec, **fields) if spec.name == "embed.weight" else spec for spec in MANIFEST.tensors)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (MANIFEST.tensors[1:], "1 missing: embed.weight"),
        (MANIFEST.tensors[4:], "4 missing: embed.weight, layers.0.mlp.experts.0.up_proj.weight, layers.0.norm.weight, ..."),
        ((*MANIFEST.tensors, TensorSpec(name="lm_head.weight", shape=(2,), dtype="float32")), "1 extra: lm_head.weight"),
        ((*MANIFEST.tensors, MANIFEST.tensors[0]), "1 named more than once: embed.weight"),
        (changed(shape=(33, 64)), r"1 different: embed.weight \(model float32\[64, 33\], offered float32\[33, 64\]\)"),
        (changed(dtype="bfloat16"), r"1 different: embed.weight \(model float32\[64, 33\], offered bfloat16\[64, 33\]\)"),
    ],
)
def test_a_manifest_of_another_model_is_refused(tensors, said):
    engine = Engine()
    with pytest.raises(WeightError, match=said):
        engine.session.begin(Manifest(version=1, tensors=tensors, pieces=PIECES))


def test_a_loader_that_changes_one_bit_is_found(install, bucket):
    engine = Engine(damages="layers.1.proj.weight")
    engine.session.begin(MANIFEST)
    with pytest.raises(WeightError, match="layers.1.proj.weight.*installed bytes have digest"):
        install(engine, bucket)


def test_bytes_damaged_on_the_way_are_found(install, source, bucket):
    engine = Engine()
    engine.session.begin(MANIFEST)
    source.sender._buffers[0].reserve(bucket.num_bytes)[bucket.entries[1].offset] ^= 1
    with pytest.raises(WeightError, match=bucket.entries[1].name):
        install(engine, bucket)


def test_a_loader_that_keeps_the_bucket_s_memory_is_refused(install, bucket):
    engine = Engine()
    engine.session._loader = Loader(load=lambda name, start, piece: [place_of_all(piece)])
    engine.session.begin(MANIFEST)
    with pytest.raises(WeightError, match="kept the bucket's memory"):
        install(engine, bucket)


def test_a_view_into_a_fused_parameter_is_verified(install, bucket):
    fused = torch.zeros(100, 60, dtype=torch.bfloat16)
    engine = Engine()

    def load(name, start, piece):
        if name != "layers.0.mlp.experts.0.up_proj.weight":
            return engine.load(name, start, piece)
        return copy_into(fused[:, 10:40].T, start, piece)

    engine.session._loader = Loader(load=load)
    engine.session.begin(MANIFEST)
    install(engine, bucket)
    engine.session.finish(4)
    assert torch.equal(fused[:, 10:40].T, MODEL["layers.0.mlp.experts.0.up_proj.weight"])


def test_the_loader_s_own_error_names_the_tensor(install, bucket):
    engine = Engine(fails_on="steps")
    engine.session.begin(MANIFEST)
    with pytest.raises(WeightError, match="'steps': the engine could not load it: KeyError"):
        install(engine, bucket)


def test_a_tensor_may_arrive_only_once(install, bucket):
    engine = Engine()
    engine.session.begin(MANIFEST)
    with pytest.raises(WeightError, match=f"'{bucket.entries[0].name}' arrived twice"):
        install(engine, bucket, bucket)


def test_an_unknown_tensor_is_refused(install, bucket):
    engine = Engine()
    engine.session.begin(MANIFEST)
    entry = replace(bucket.entries[0], name="lm_head.weight")
    with pytest.raises(WeightError, match="'lm_head.weight' is not a tensor of this model"):
        install(engine, replace(bucket, entries=(entry,)))


def test_an_entry_of_another_size_is_refused(install, bucket):
    engine = Engine()
    engine.session.begin(MANIFEST)
    entry = replace(bucket.entries[0], num_bytes=bucket.entries[0].num_bytes - 4)
    with pytest.raises(WeightError, match="same version of moerl"):
        install(engine, replace(bucket, entries=(entry,)))


def test_an_incomplete_push_cannot_finish(install, bucket):
    engine = Engine()
    engine.session.begin(MANIFEST)
    install(engine, without(bucket, "nothing"))
    with pytest.raises(WeightError, match="1 of 7 tensors never arrived: nothing, trainer rank 0"):
        engine.session.finish(4)


def test_the_version_must_be_the_manifest_s(install, bucket):
    engine = Engine()
    engine.session.begin(MANIFEST)
    install(engine, bucket)
    with pytest.raises(WeightError, match="began as version 4"):
        engine.session.finish(5)


@pytest.fixture
def in_pieces(source):
    """A tensor of 8448 bytes in three buckets: manifest and offer."""
    source.model = {"embed.weight": MODEL["embed.weight"]}
    source._bucket_bytes = 3000
    manifest, offer = first_push(source)
    assert sorted(piece.start for piece in manifest.pieces["embed.weight"]) == [(0, 0), (22, 0), (43, 0)]
    return manifest, offer


ONE = {"embed.weight": SPECS["embed.weight"]}


def test_pieces_of_a_tensor_are_loaded_and_compared_as_they_come(install, source, in_pieces):
    manifest, offer = in_pieces
    engine = Engine(specs=ONE)
    engine.session.begin(manifest)
    for count, bucket in enumerate(offer.buckets, start=1):
        source.sender.pack(bucket.index)
        install(engine, bucket)
        came = {entry.start: entry.shape for done in offer.buckets[:count] for entry in done.entries}
        expected = torch.zeros(64, 33)
        for start, shape in came.items():
            box_of(expected, start, shape).copy_(box_of(MODEL["embed.weight"], start, shape))
        assert torch.equal(engine.tensors["embed.weight"], expected)
    engine.session.finish(1)


def test_a_loader_that_wants_a_tensor_whole_gets_it_when_it_is_in_memory_that_it_may_keep(install, source, in_pieces):
    manifest, offer = in_pieces
    engine, loaded = Engine(specs=ONE), []

    def load(name, start, tensor):
        loaded.append((name, start, tensor))
        return [place_of_all(tensor)]

    engine.session._loader = Loader(load=load, takes_whole=lambda name: True)
    engine.session.begin(manifest)
    for bucket in offer.buckets:
        assert loaded == []
        source.sender.pack(bucket.index)
        install(engine, bucket)
    engine.session.finish(1)
    ((name, start, tensor),) = loaded
    assert (name, start) == ("embed.weight", (0, 0))
    assert torch.equal(tensor, MODEL["embed.weight"])


def keeping(engine, *, verifies, damages=False):
    """A loader that copies at the end of a push."""
    kept = []

    def load(name, start, tensor):
        kept.append((name, tensor))

    def settle():
        for name, tensor in kept if verifies else ():
            places = copy_into(engine.tensors[name], (0,) * tensor.dim(), tensor)
            if damages:
                engine.tensors[name].view(torch.uint8).view(-1)[0] ^= 1
            engine.session.verify(name, places)

    return Loader(load=load, takes_whole=lambda name: True, settle=settle)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"verifies": False}, "did not take, or not by a plain copy, 1 tensors: embed.weight"),
        ({"verifies": True, "damages": True}, r"'embed.weight'.*installed bytes have digest.*the engine's loader changed them"),
    ],
)
def test_what_a_loader_keeps_must_be_copied_and_is_compared_then(install, source, in_pieces, options, said):
    manifest, offer = in_pieces
    engine = Engine(specs=ONE)
    engine.session._loader = keeping(engine, **options)
    engine.session.begin(manifest)
    for bucket in offer.buckets:
        source.sender.pack(bucket.index)
        install(engine, bucket)
    with pytest.raises(WeightError, match=said):
        engine.session.finish(1)
    engine.session._loader = keeping(engine, verifies=True)
    engine.session.begin(manifest)
    for bucket in offer.buckets:
        source.sender.pack(bucket.index)
        install(engine, bucket)
    engine.session.finish(1)
    assert torch.equal(engine.tensors["embed.weight"], MODEL["embed.weight"])


def test_a_manifest_whose_pieces_do_not_make_up_a_tensor_is_refused():
    half = replace(PIECES["embed.weight"][0], shape=(32, 33))
    with pytest.raises(WeightError, match=r"'embed.weight' \[64, 33\]: its pieces \(\[32, 33\] at \[0, 0\]\) do not make it up"):
        Engine().session.begin(replace(MANIFEST, pieces=PIECES | {"embed.weight": (half,)}))


def test_a_process_installs_what_it_needs_and_no_more(install, bucket):
    needs = ["embed.weight", "steps"]
    engine = Engine(needs=needs)
    engine.session.begin(MANIFEST)
    with pytest.raises(WeightError, match="arrived twice in one push, or where nobody needs it"):
        install(engine, bucket)
    engine.session.begin(MANIFEST)
    entries = tuple(entry for entry in bucket.entries if entry.name in needs)
    install(engine, replace(bucket, entries=entries))
    engine.session.finish(4)
    assert engine.digests() == {name: PIECES[name][0].digest for name in needs}


def test_after_an_error_everything_is_refused_until_the_next_begin(install, bucket):
    engine = Engine(damages="steps")
    engine.session.begin(MANIFEST)
    with pytest.raises(WeightError, match="digest"):
        install(engine, bucket)
    for refused in (lambda: install(engine, bucket), lambda: engine.session.finish(4)):
        with pytest.raises(WeightError, match="without a push in progress"):
            refused()
    engine.damages = ""
    engine.session.begin(MANIFEST)
    install(engine, bucket)
    engine.session.finish(4)
    assert engine.session._last.version == 4


def test_a_refused_manifest_ends_the_push_before_it(install, bucket):
    engine = Engine()
    engine.session.begin(MANIFEST)
    install(engine, bucket)
    with pytest.raises(WeightError, match="missing"):
        engine.session.begin(Manifest(version=5, tensors=(), pieces={}))
    with pytest.raises(WeightError, match="without a push in progress"):
        engine.session.finish(4)


def test_install_before_connect_is_refused():
    engine = Engine()
    engine.session.begin(MANIFEST)
    with pytest.raises(WeightError, match="connect it first"):
        engine.session.install()


def test_close_is_safe_to_repeat_and_ends_the_push(install, bucket):
    engine = Engine()
    engine.session.begin(MANIFEST)
    engine.session.close()
    engine.session.close()
    with pytest.raises(WeightError, match="without a push in progress"):
        install(engine, bucket)


@pytest.mark.parametrize("path", ["/proc/0/fd/3", "/proc/self/fd/0"])
def test_memory_that_cannot_be_mapped_names_the_remedy(bucket, path):
    with pytest.raises(WeightError, match="weights.transport=nccl"):
        SharedReader().fetch(bucket, path)


def test_a_bucket_larger_than_its_memory_is_refused(source, bucket):
    with pytest.raises(WeightError, match=rf"holds {bucket.num_bytes} bytes, but the bucket has {bucket.num_bytes + 1}"):
        SharedReader().fetch(replace(bucket, num_bytes=bucket.num_bytes + 1), source.sender._buffers[0].source)
