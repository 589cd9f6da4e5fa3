"""The engine's side of a weight push: fetches buckets, installs their tensors and verifies the *installed* bytes. Blocking.

connect -> [begin -> install -> finish] per push. After any error everything is refused until the next begin, and connections are dropped,
so that others stop waiting for this one; the next push then begins with connect. One session for each process that holds a part of the
model.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod

import torch

from moerl.cluster.run_secret import RunSecret
from moerl.types.errors import WeightError
from moerl.types.push import Bucket, BucketEntry, Manifest, Piece, TensorSpec, TransportOffer
from moerl.weights.plan.tensor_specs import CPU, box_of, manifest_difference, torch_dtype, view_as
from moerl.weights.transport.disk_transport import DIRECTORY_KEY, DiskReader, Read
from moerl.weights.transport.gpu_transport import finished
from moerl.weights.transport.links import Borrower, rank_key
from moerl.weights.transport.network_transport import NetworkReader
from moerl.weights.transport.rendezvous import JOIN_SECONDS, Deadline, Rendezvous
from moerl.weights.transport.shared_memory import SharedReader
from moerl.weights.verify.diagnose import Damage, Installed, describe_absent, explain_damage, explain_difference
from moerl.weights.verify.digest import tensor_digest

DEVICE_BYTES = 2 * 256 * 2**20
"""Two buckets of weights.bucket_bytes as it is by default."""


class Assembly:
    """Memory of one push, in which tensors that come in pieces are put together.

    A batch is on its way at once, and an embedding or output layer by itself has gigabytes in large models (docs/benchmarks.md), which a
    GPU full of weights and caches has not. So a device lends no more than two buckets; the rest waits in host memory and crosses to it
    when whole.
    """

    def __init__(self, *, device_bytes: int = DEVICE_BYTES):
        """`device_bytes`: at most so many are on a device at a time."""
        self._left = device_bytes

    def empty(self, spec: TensorSpec, device: torch.device) -> torch.Tensor:
        """Memory for the whole tensor, whose pieces arrive on `device`: there, or in host memory."""
        num_bytes = prod(spec.shape) * torch_dtype(spec).itemsize
        if device != CPU and num_bytes > self._left:
            device = CPU
        if device != CPU:
            self._left -= num_bytes
        return torch.empty(spec.shape, dtype=torch_dtype(spec), device=device)

    def free(self, whole: torch.Tensor) -> None:
        """It is installed."""
        if whole.device != CPU:
            self._left += whole.nbytes


class Incoming:
    """Buckets of one model process, as they come from memory or files of the senders or over a network, in all pushes until an error.

    The constructor returns when it has connected to those from whom buckets come; nccl: when all have joined.
    """

    def __init__(self, offer: TransportOffer, *, device: torch.device, read: Read | None):
        self._device, self._seconds = device, offer.seconds
        self._buckets = [bucket for bucket in offer.buckets if offer.reader in bucket.readers]
        if offer.transport == "nccl":
            # What this process passes on comes first in its round, so that others wait for it no longer than they must.
            self._buckets.sort(key=lambda bucket: (bucket.round, bucket.readers[0] != offer.reader))
        self._from = self._reader(offer, Deadline(min(offer.seconds, JOIN_SECONDS)), read)

    def buckets(self) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Buckets of one push, each with its bytes: uint8 [bucket.num_bytes], which the caller has used when it asks for the next."""
        deadline = Deadline(self._seconds)
        for bucket in self._buckets:
            yield bucket, self._from.fetch(bucket, deadline)
            finished(self._device)
            self._from.done(bucket)

    def rest(self) -> None:
        """The push has ended; the next one goes over the same connections."""
        self._from.rest()

    def close(self) -> None:
        """Safe to call twice."""
        self._from.close()

    def _reader(self, offer: TransportOffer, deadline: Deadline, read: Read | None) -> NetworkReader | Borrower:
        rendezvous = Rendezvous.join(offer.address, RunSecret(key=offer.secret), deadline)
        if offer.transport == "nccl":
            return NetworkReader(rendezvous, offer, self._buckets, device=self._device, deadline=deadline)
        try:
            return self._borrower(rendezvous, offer, deadline, read)
        finally:
            rendezvous.close()

    def _borrower(self, rendezvous: Rendezvous, offer: TransportOffer, deadline: Deadline, read: Read | None) -> Borrower:
        memory = SharedReader() if offer.transport == "ipc" else DiskReader(rendezvous.ask(DIRECTORY_KEY), read=read)
        borrower = Borrower(memory, lambda bucket: rank_key(bucket.sender))
        try:
            lenders = {rank_key(bucket.sender) for bucket in self._buckets}
            borrower.join(rendezvous, lenders, reader=offer.reader, name=offer.server, deadline=deadline)
        except WeightError:
            borrower.close()
            raise
        return borrower


Load = Callable[[str, torch.Tensor], torch.Tensor]
"""Copies a tensor into the model under its checkpoint name and returns what the model now holds (possibly a view into a fused
parameter). The argument's memory is the sender's or the network's: it must not be kept."""


@dataclass(eq=False, slots=True, kw_only=True)
class _Waiting:
    """A tensor that has not been installed yet."""

    spec: TensorSpec
    pieces: dict[tuple[int, ...], Piece]
    """Those that have not come, by where they begin."""
    whole: torch.Tensor | None = None
    """Those that have come, if there is more than one."""
    come: list[Piece] = field(default_factory=list)


class WeightSession:
    """Weights that the model holds, and how far a push has come. Safe to call from several threads: one call runs at a time."""

    def __init__(
        self,
        expected: Mapping[str, TensorSpec],
        load: Load,
        *,
        needs: Collection[str] | None = None,
        read: Read | None = None,
        device: torch.device = CPU,
    ):
        """`expected`: every tensor of the model, by name. `needs`: those of which this process holds something; None: all.

        `read`: gives back what was loaded, for deltas on disk; None: cannot. `device`: on which buckets arrive over a network.
        """
        self._expected = dict(expected)
        self.needs: tuple[str, ...] = tuple(expected if needs is None else needs)
        self._load, self._read, self._device = load, read, device
        self._lock = threading.Lock()
        self._incoming: Incoming | None = None
        self._manifest: Manifest | None = None
        self._waiting: dict[str, _Waiting] = {}
        self._assembly = Assembly()
        self._version: int | None = None
        self._digests: dict[tuple[str, tuple[int, ...]], str] = {}
        self._last = Installed()

    @property
    def version(self) -> int | None:
        """Version of the last verified push; None before it, and from begin until finish, when the model holds a mixture."""
        return self._version

    def connect(self, offer: TransportOffer) -> None:
        """Returns when this process has connected to those that it gets buckets from; nccl: when all senders and readers have joined."""
        with self._exclusive():
            self._disconnect()
            self._incoming = Incoming(offer, device=self._device, read=self._read)

    def begin(self, manifest: Manifest) -> None:
        """Refuses a manifest that does not name exactly the expected tensors with their shapes and dtypes, each with all of its pieces."""
        with self._exclusive():
            self._manifest, self._version = None, None
            if difference := manifest_difference(self._expected.values(), manifest.tensors):
                raise WeightError(explain_difference(manifest, difference, self._expected))
            self._waiting = {name: _waiting(self._expected[name], manifest.pieces.get(name, ())) for name in self.needs}
            self._manifest, self._digests, self._assembly = manifest, {}, Assembly()

    @torch.no_grad()
    def install(self) -> None:
        """Returns when every bucket of the offer that is this process's has come, its tensors lie in the model, and their installed bytes
        have the senders' digests."""
        with self._exclusive():
            manifest = self._require_push("install")
            if self._incoming is None:
                raise WeightError("install before connect: this engine does not know how to reach the trainer; connect it first")
            for bucket, data in self._incoming.buckets():
                for entry in bucket.entries:
                    self._take(entry, data, manifest)
                del data

    def finish(self, version: int) -> None:
        """Every tensor must have been installed once, and `version` must be the manifest's."""
        with self._exclusive():
            manifest = self._require_push("finish")
            if version != manifest.version:
                raise WeightError(f"finish(version={version}): the push began as version {manifest.version}; push again")
            if self._waiting:
                raise WeightError(
                    f"version {version} is incomplete: {len(self._waiting)} of {len(self.needs)} tensors never arrived: "
                    f"{describe_absent(self._waiting, manifest.pieces)}. "
                    "Likely cause: a trainer rank drops tensors of its share, or a bucket was lost"
                )
            if self._incoming is not None:
                self._incoming.rest()
            self._manifest, self._version = None, version
            self._last = Installed(version=version, digests=self._digests)

    def close(self) -> None:
        """Forget the transport. Safe to call twice; waits for a call in progress."""
        with self._lock:
            self._disconnect()
            self._manifest = None

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except BaseException:
                self._manifest, self._version, self._waiting = None, None, {}
                self._disconnect()
                raise

    def _disconnect(self) -> None:
        if self._incoming is not None:
            self._incoming.close()
        self._incoming = None

    def _require_push(self, step: str) -> Manifest:
        if self._manifest is None:
            raise WeightError(f"{step} without a push in progress: it was not begun, or an error ended it; begin again")
        return self._manifest

    def _take(self, entry: BucketEntry, data: torch.Tensor, manifest: Manifest) -> None:
        """One piece. A tensor of several is put together in memory of its own, because loaders want it whole."""
        waiting = self._waiting.get(entry.name)
        piece = None if waiting is None else waiting.pieces.pop(entry.start, None)
        if waiting is None or piece is None:
            known = entry.name in self._expected
            reason = "arrived twice in one push, or where nobody needs it" if known else "is not a tensor of this model"
            raise WeightError(f"tensor {entry.name!r} {reason}; a trainer rank must send every piece of its share once")
        received = _received(entry, piece, waiting.spec, data)
        waiting.come.append(piece)
        if piece.shape == waiting.spec.shape:
            whole = received
        else:
            if waiting.whole is None:
                waiting.whole = self._assembly.empty(waiting.spec, received.device)
            whole = waiting.whole
            box_of(whole, piece.start, piece.shape).copy_(received)
        if not waiting.pieces:
            del self._waiting[entry.name]
            self._install(waiting, whole.to(received.device), manifest)
            if waiting.whole is not None:
                self._assembly.free(waiting.whole)

    def _install(self, tensor: _Waiting, whole: torch.Tensor, manifest: Manifest) -> None:
        name = tensor.spec.name
        try:
            installed = self._load(name, whole)
        except Exception as error:  # the engine's own code: whatever it raises, this tensor is not installed
            raise WeightError(f"tensor {name!r}: the engine could not load it: {type(error).__name__}: {error}") from error
        if whole.nbytes and installed.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr():
            raise WeightError(f"tensor {name!r}: load kept the bucket's memory, which the next bucket overwrites; it must copy")
        for piece in tensor.come:
            found = tensor_digest(box_of(installed, piece.start, piece.shape))
            if found != piece.digest:
                received = tensor_digest(box_of(whole, piece.start, piece.shape))
                damage = Damage(spec=tensor.spec, piece=piece, received=received, installed=found)
                raise WeightError(explain_damage(damage, manifest, self._last))
            self._digests[name, piece.start] = found


def _waiting(spec: TensorSpec, pieces: Collection[Piece]) -> _Waiting:
    """WeightError if the pieces cannot make up the tensor."""
    if sum(prod(piece.shape) for piece in pieces) != prod(spec.shape) or not pieces:
        boxes = ", ".join(f"{list(piece.shape)} at {list(piece.start)}" for piece in pieces)
        raise WeightError(f"tensor {spec.name!r} {list(spec.shape)}: its pieces ({boxes}) do not make it up; the plan of the push is wrong")
    return _Waiting(spec=spec, pieces={piece.start: piece for piece in pieces})


def _received(entry: BucketEntry, piece: Piece, spec: TensorSpec, data: torch.Tensor) -> torch.Tensor:
    expected = prod(piece.shape) * torch_dtype(spec).itemsize
    end = entry.offset + entry.num_bytes
    if entry.num_bytes != expected or entry.shape != piece.shape or entry.offset < 0 or end > len(data):
        raise WeightError(
            f"tensor {entry.name!r}: bytes [{entry.offset}, {end}) of a bucket of {len(data)} for {spec.dtype}{list(entry.shape)}, but "
            f"{spec.dtype}{list(piece.shape)} has {expected}; sender and receiver must run the same version of moerl"
        )
    return view_as(data[entry.offset : end], TensorSpec(name=spec.name, shape=piece.shape, dtype=spec.dtype))
