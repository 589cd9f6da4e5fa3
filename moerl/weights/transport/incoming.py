"""The buckets of one model process of a server, as they come: from memory or files of the senders, or over a network."""

from collections.abc import Iterator

import torch

from moerl.types.errors import WeightError
from moerl.types.push import Bucket, TransportOffer
from moerl.weights.transport.disk_transport import DIRECTORY_KEY, DiskReader, Read
from moerl.weights.transport.gpu_transport import finished
from moerl.weights.transport.links import Borrower, rank_key
from moerl.weights.transport.network_transport import NetworkReader
from moerl.weights.transport.rendezvous import JOIN_SECONDS, Deadline, Rendezvous
from moerl.weights.transport.shared_memory import SharedReader


class Incoming:
    """Buckets of all pushes until an error. The constructor returns when it has connected to those from whom buckets come; nccl: when all
    have joined."""

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

    def close(self) -> None:
        """Safe to call twice."""
        self._from.close()

    def _reader(self, offer: TransportOffer, deadline: Deadline, read: Read | None) -> NetworkReader | Borrower:
        rendezvous = Rendezvous.join(offer.address, deadline)
        if offer.transport == "nccl":
            return NetworkReader(rendezvous, offer, self._buckets, device=self._device, deadline=deadline)
        memory = SharedReader() if offer.transport == "ipc" else DiskReader(rendezvous.ask(DIRECTORY_KEY), read=read)
        borrower = Borrower(memory, lambda bucket: rank_key(bucket.sender))
        try:
            lenders = {rank_key(bucket.sender) for bucket in self._buckets}
            borrower.join(rendezvous, lenders, reader=offer.reader, name=offer.server, deadline=deadline)
        except WeightError:
            borrower.close()
            raise
        return borrower
