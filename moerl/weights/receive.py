"""The engine's side of a weight push: fetches buckets, installs their tensors and verifies the *installed* bytes. Blocking.

connect -> [begin -> install, install, ... -> finish] per push. After any error everything is refused until the next begin, and a gloo
group is dropped, so that the sender and the other receivers stop waiting for this one; the next push then begins with connect.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from moerl.push_types import Bucket, BucketEntry, Manifest, TensorSpec, TransportOffer
from moerl.types import WeightError
from moerl.weights.diagnose import Damage, Installed, describe_absent, explain_damage, explain_difference
from moerl.weights.digest import tensor_digest
from moerl.weights.disk import DiskReader, Read
from moerl.weights.gloo import TRANSFER_SECONDS, GlooReader
from moerl.weights.shm import SharedReader
from moerl.weights.spec import manifest_difference, num_bytes, view_as

Load = Callable[[str, torch.Tensor], torch.Tensor]
"""Copies a tensor into the model under its checkpoint name and returns what the model now holds (possibly a view into a fused
parameter). The argument's memory is the sender's or the network's: it must not be kept."""


class WeightSession:
    """What the model holds and how far a push has come. Safe to call from several threads: one call runs at a time."""

    def __init__(
        self, expected: Mapping[str, TensorSpec], load: Load, *, read: Read | None = None, timeout_seconds: float = TRANSFER_SECONDS
    ):
        """`expected`: every tensor of the model, by name. `read`: gives back what was loaded, for deltas on disk; None: cannot.

        `timeout_seconds`: gloo's, to join and for one bucket.
        """
        self._expected = dict(expected)
        self._load, self._read = load, read
        self._timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._reader: SharedReader | GlooReader | DiskReader | None = None
        self._manifest: Manifest | None = None
        self._waiting: dict[str, TensorSpec] = {}
        self._next_index = 0
        self._version: int | None = None
        self._digests: dict[str, str] = {}
        self._last = Installed()

    @property
    def version(self) -> int | None:
        """Of the last verified push; None before it, and from begin until finish, when the model holds a mixture."""
        return self._version

    def connect(self, offer: TransportOffer) -> None:
        """gloo: returns when the sender and all receivers have joined."""
        with self._exclusive():
            if self._reader is not None:
                self._reader.close()
            self._reader = None
            if offer.transport == "shm":
                self._reader = SharedReader()
            elif offer.transport == "disk":
                self._reader = DiskReader(offer.address, read=self._read)
            else:
                self._reader = GlooReader(offer, timeout_seconds=self._timeout_seconds)

    def begin(self, manifest: Manifest) -> None:
        """Refuses a manifest that does not name exactly the expected tensors with their shapes and dtypes."""
        with self._exclusive():
            self._manifest, self._version = None, None
            if difference := manifest_difference(self._expected.values(), manifest.tensors):
                raise WeightError(explain_difference(manifest, difference, self._expected))
            self._manifest, self._waiting, self._next_index, self._digests = manifest, dict(self._expected), 0, {}

    @torch.no_grad()
    def install(self, bucket: Bucket) -> None:
        """Returns when every tensor of the bucket lies in the model and its installed bytes have the sender's digest."""
        with self._exclusive():
            manifest = self._require_push("install")
            if self._reader is None:
                raise WeightError("install before connect: this engine does not know how to reach the trainer; connect it first")
            if bucket.index != self._next_index:
                raise WeightError(f"bucket.index = {bucket.index}: must be {self._next_index}, buckets arrive in order; push again")
            data = self._reader.fetch(bucket)
            for entry in bucket.entries:
                self._install_one(entry, data, manifest)
            self._next_index += 1

    def finish(self, version: int) -> None:
        """Every tensor must have been installed once, and `version` must be the manifest's."""
        with self._exclusive():
            manifest = self._require_push("finish")
            if version != manifest.version:
                raise WeightError(f"finish(version={version}): the push began as version {manifest.version}; push again")
            if self._waiting:
                raise WeightError(
                    f"version {version} is incomplete: {len(self._waiting)} of {len(self._expected)} tensors never arrived: "
                    f"{describe_absent(self._waiting, manifest.origins)}. "
                    "Likely cause: the trainer's export drops tensors of its manifest, or a bucket was lost"
                )
            self._manifest, self._version = None, version
            self._last = Installed(version=version, digests=self._digests)

    def close(self) -> None:
        """Forget the transport. Safe to call twice; waits for a call in progress."""
        with self._lock:
            if self._reader is not None:
                self._reader.close()
            self._reader, self._manifest = None, None

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except BaseException:
                self._manifest, self._version = None, None
                if self._reader is not None:
                    self._reader.close()
                raise

    def _require_push(self, step: str) -> Manifest:
        if self._manifest is None:
            raise WeightError(f"{step} without a push in progress: it was not begun, or an error ended it; begin again")
        return self._manifest

    def _install_one(self, entry: BucketEntry, data: torch.Tensor, manifest: Manifest) -> None:
        spec = self._waiting.pop(entry.name, None)
        if spec is None:
            known = entry.name in self._expected
            reason = "arrived twice in one push" if known else "is not a tensor of this model"
            raise WeightError(f"tensor {entry.name!r} {reason}; the trainer's export must yield every tensor of its manifest once")
        _check_place(entry, spec, len(data))
        received = view_as(data[entry.offset : entry.offset + entry.num_bytes], spec)
        try:
            installed = self._load(entry.name, received)
        except Exception as error:  # the engine's own code: whatever it raises, this tensor is not installed
            raise WeightError(f"tensor {entry.name!r}: the engine could not load it: {type(error).__name__}: {error}") from error
        if entry.num_bytes and installed.untyped_storage().data_ptr() == data.untyped_storage().data_ptr():
            raise WeightError(f"tensor {entry.name!r}: load kept the bucket's memory, which the next bucket overwrites; it must copy")
        found = tensor_digest(installed)
        if found != entry.digest:
            damage = Damage(spec=spec, expected=entry.digest, received=tensor_digest(received), installed=found)
            raise WeightError(explain_damage(damage, manifest, self._last))
        self._digests[entry.name] = found


def _check_place(entry: BucketEntry, spec: TensorSpec, available: int) -> None:
    if entry.num_bytes != num_bytes(spec) or entry.offset < 0 or entry.offset + entry.num_bytes > available:
        raise WeightError(
            f"tensor {entry.name!r}: bytes [{entry.offset}, {entry.offset + entry.num_bytes}) of a bucket of {available}, but {spec.dtype}"
            f"{list(spec.shape)} has {num_bytes(spec)}; sender and receiver must run the same version of moerl"
        )
