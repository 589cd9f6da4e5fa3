"""The engine's side of a weight push: fetches buckets, installs their tensors and verifies the *installed* bytes. Blocking.

connect -> [begin -> install -> finish] per push. After any error everything is refused until the next begin, and connections are dropped,
so that others stop waiting for this one; the next push then begins with connect. One session for each process that holds a part of the
model.
"""

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from moerl.cluster.run_secret import RunSecret
from moerl.types.errors import WeightError
from moerl.types.push import Bucket, Manifest, TensorSpec, TransportOffer
from moerl.weights.installation import Installation, Loader
from moerl.weights.plan.spec_tensors import CPU
from moerl.weights.plan.tensor_specs import manifest_difference
from moerl.weights.transport.disk_transport import DIRECTORY_KEY, DiskReader, Read
from moerl.weights.transport.gpu_transport import finished
from moerl.weights.transport.links import Borrower, rank_key
from moerl.weights.transport.network_transport import NetworkReader
from moerl.weights.transport.rendezvous import JOIN_SECONDS, Deadline, Rendezvous
from moerl.weights.transport.shared_memory import SharedReader
from moerl.weights.verify.diagnose import Installed, explain_difference
from moerl.weights.verify.places import Place


class Incoming:
    """Buckets of one model process, as they come from memory or files of the senders or over a network, in all pushes until an error.

    The constructor returns when it has connected to those from whom buckets come; nccl: when all have joined. relay is as ipc here.
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
        memory = DiskReader(rendezvous.ask(DIRECTORY_KEY), read=read) if offer.transport == "disk" else SharedReader()
        borrower = Borrower(memory, lambda bucket: rank_key(bucket.lender))
        try:
            lenders = {rank_key(bucket.lender) for bucket in self._buckets}
            borrower.join(rendezvous, lenders, reader=offer.reader, name=offer.server, deadline=deadline)
        except WeightError:
            borrower.close()
            raise
        return borrower


class WeightSession:
    """Weights that the model holds, and how far a push has come. Safe to call from several threads: one call runs at a time."""

    def __init__(
        self,
        expected: Mapping[str, TensorSpec],
        loader: Loader,
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
        self._loader, self._read, self._device = loader, read, device
        self._lock = threading.Lock()
        self._incoming: Incoming | None = None
        self._push: Installation | None = None
        self._last = Installed()

    def connect(self, offer: TransportOffer) -> None:
        """Returns when this process has connected to those that it gets buckets from; nccl: when all senders and readers have joined."""
        with self._exclusive():
            self._disconnect()
            self._incoming = Incoming(offer, device=self._device, read=self._read)

    def begin(self, manifest: Manifest) -> None:
        """Refuses a manifest that does not name exactly the expected tensors with their shapes and dtypes, each with all of its pieces."""
        with self._exclusive():
            self._push = None
            if difference := manifest_difference(self._expected.values(), manifest.tensors):
                raise WeightError(explain_difference(manifest, difference, self._expected))
            self._push = Installation(self._expected, self.needs, self._loader, manifest, self._last)

    @torch.no_grad()
    def install(self) -> None:
        """Returns when every bucket of the offer that is this process's has come, its tensors lie in the model, and their installed bytes
        have the senders' digests."""
        with self._exclusive():
            push = self._require_push("install")
            if self._incoming is None:
                raise WeightError("install before connect: this engine does not know how to reach the trainer; connect it first")
            for bucket, data in self._incoming.buckets():
                for entry in bucket.entries:
                    push.take(entry, data)
                del data

    def verify(self, name: str, places: Sequence[Place]) -> None:
        """A tensor that the loader kept lies in these `places`. Called by the loader, when it copies it."""
        self._require_push("verify").verify(name, places)

    @torch.no_grad()
    def finish(self, version: int) -> None:
        """Every tensor must have been installed once, and `version` must be the manifest's."""
        with self._exclusive():
            push = self._require_push("finish")
            if version != push.manifest.version:
                raise WeightError(f"finish(version={version}): the push began as version {push.manifest.version}; push again")
            push.check_came()
            self._loader.settle()
            push.check_copied()
            if self._incoming is not None:
                self._incoming.rest()
            self._push = None
            self._last = Installed(version=version, digests=push.digests)

    def close(self) -> None:
        """Forget the transport. Safe to call twice; waits for a call in progress."""
        with self._lock:
            self._disconnect()
            self._push = None

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except BaseException:
                self._push = None
                self._disconnect()
                raise

    def _disconnect(self) -> None:
        if self._incoming is not None:
            self._incoming.close()
        self._incoming = None

    def _require_push(self, step: str) -> Installation:
        if self._push is None:
            raise WeightError(f"{step} without a push in progress: it was not begun, or an error ended it; begin again")
        return self._push
