"""Messages between a process that has buckets in its memory (or files) and those that read them there.

    lender: "bucket 5 lies here" --> borrower reads, installs --> "done" --> lender fills that memory again

Every two have a connection, so that who waits for one that ends hears it at once. Nobody waits for ever, and no two for each other: all
go through the buckets in one order (deliveries.in_order), so whoever has the first of those that are not done waits for nobody who waits.
"""

import json
import select
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress

import torch

from moerl.cluster.error_texts import LATE, LEFT
from moerl.cluster.secret_listener import SecretListener, connect_proven
from moerl.types.errors import WeightError
from moerl.types.push import Bucket
from moerl.weights.transport.disk_transport import DiskReader
from moerl.weights.transport.rendezvous import Deadline, Rendezvous, explained
from moerl.weights.transport.shared_memory import SharedReader

_HELLO_SECONDS = 5.0
_LINE_BYTES = 2**16


class Link:
    """A connection to `peer`, by its name in errors. Both say lines."""

    def __init__(self, connection: socket.socket, peer: str = "a reader"):
        self._connection, self._lines, self.peer = connection, connection.makefile("rb"), peer

    def say(self, line: str) -> None:
        try:
            self._connection.sendall(f"{line}\n".encode())
        except OSError as error:
            raise WeightError(f"{self.peer} {LEFT} ({error})") from error

    def hear(self, awaited: str, deadline: Deadline) -> str:
        """Also an empty line. `awaited`: what it tells, for errors."""
        try:
            self._connection.settimeout(deadline.left())
            line = self._lines.readline(_LINE_BYTES)
        except TimeoutError as error:
            raise WeightError(f"{awaited} {LATE} {deadline} from {self.peer}") from error
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            raise WeightError(f"{self.peer} {LEFT}; {awaited} did not come")
        return line[:-1].decode()

    def check(self) -> None:
        """WeightError if the other side is gone, also if lines of it are still to be heard."""
        poll = select.poll()
        poll.register(self._connection, select.POLLRDHUP)
        if poll.poll(0):
            raise WeightError(f"{self.peer} {LEFT}")

    def close(self) -> None:
        """Safe to call twice."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # also if a child of this process has inherited it
        self._lines.close()
        self._connection.close()


class Lender:
    """Side of one process, whose memory has slots for buckets."""

    def __init__(self, key: str, name: str, host: str, rendezvous: Rendezvous, readers: Collection[int]):
        """`key`, under which `readers` look for it in the `rendezvous`; its `name` for errors; an address of this `host`."""
        self._links: dict[int, Link] = {}
        self._lent: dict[int, tuple[Bucket, Sequence[int]]] = {}
        self._readers, self._changed = frozenset(readers), threading.Condition()
        # From now on, lest the system's queue of those that wait to be accepted, 128 on old kernels, keeps readers from connecting.
        with explained(f"no port on {host} for readers of {name}"):
            self._listener = SecretListener(host, rendezvous.secret, self._meet, name=f"readers of {name}")
        rendezvous.tell(_key_of(key), json.dumps({"host": host, "port": self._listener.port, "name": name}))

    def accept(self, deadline: Deadline) -> None:
        """Returns when all readers have come. For the first push: those that could not connect have ended it before."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._missing(), timeout=deadline.left()):
                raise WeightError(f"{len(self._missing())} of {len(self._readers)} readers {LATE} {deadline}")

    def lend(self, bucket: Bucket, source: str, readers: Sequence[int], *, slot: int) -> None:
        """`source`: what readers find it by."""
        self._lent[slot] = (bucket, readers)
        for reader in readers:
            self._links[reader].say(f"{bucket.sender} {bucket.index} {source}")

    def wait(self, slot: int, deadline: Deadline) -> None:
        """Returns when all have read what was lent from that slot last, and before it: a reader's word does not say of what it is."""
        while slot in self._lent:
            bucket, readers = self._lent.pop(next(iter(self._lent)))
            for reader in readers:
                self._links[reader].hear(f"word that {describe(bucket)} is installed", deadline)

    def drain(self, deadline: Deadline) -> None:
        """Returns when all have read everything that was lent."""
        for slot in list(self._lent):
            self.wait(slot, deadline)

    def check(self) -> None:
        """WeightError if a reader is gone."""
        for link in self._links.values():
            link.check()

    def close(self) -> None:
        """Safe to call twice."""
        self._listener.close()
        with self._changed:
            self._readers = frozenset()
            for link in self._links.values():
                link.close()
            self._links = {}

    def _missing(self) -> frozenset[int]:
        return self._readers - set(self._links)

    def _meet(self, connection: socket.socket) -> None:
        """One that has the secret. Nobody is let in any more when all have come."""
        link = Link(connection)
        try:
            number, _, link.peer = link.hear("its name", Deadline(_HELLO_SECONDS)).partition(" ")
            reader = int(number)
        except (WeightError, ValueError):  # gone already, or of another version of moerl
            link.close()
            return
        with self._changed:
            if reader not in self._missing():
                link.close()
                return
            self._links[reader] = link
            self._changed.notify_all()
            has_all = not self._missing()
        if has_all:
            self._listener.close()


class Borrower:
    """Reads buckets where lenders have them."""

    def __init__(self, memory: SharedReader | DiskReader, lender_of: Callable[[Bucket], str]):
        """`lender_of`: the key of the one that lends a bucket."""
        self._memory, self._lender_of = memory, lender_of
        self._links: dict[str, Link] = {}

    def join(self, rendezvous: Rendezvous, lenders: Iterable[str], *, reader: int, name: str, deadline: Deadline) -> None:
        """Connects to these, by their keys, and says its number and its name; they need not have accepted yet."""
        for key in sorted(set(lenders)):
            found = json.loads(rendezvous.ask(_key_of(key), deadline))
            with explained(f"no connection to {found['name']} at {found['host']}:{found['port']}"):
                connection = connect_proven(found["host"], found["port"], rendezvous.secret, deadline.left())
            link = self._links[key] = Link(connection, found["name"])
            link.say(f"{reader} {name}")

    def fetch(self, bucket: Bucket, deadline: Deadline) -> torch.Tensor:
        """uint8 [bucket.num_bytes], until `done`."""
        link = self._links[self._lender_of(bucket)]
        sender, _, rest = link.hear(describe(bucket), deadline).partition(" ")
        index, _, source = rest.partition(" ")
        if (sender, index) != (str(bucket.sender), str(bucket.index)):
            came = f"bucket {index} of trainer rank {sender}"
            raise WeightError(f"{came} came from {link.peer} in place of {describe(bucket)}: a sender drops buckets of its share")
        return self._memory.fetch(bucket, source)

    def done(self, bucket: Bucket) -> None:
        """It is installed here."""
        self._links[self._lender_of(bucket)].say("")

    def rest(self) -> None:
        """Every bucket of a push was read: what is mapped of lenders is let go, who give it back."""
        self._memory.close()

    def check(self) -> None:
        """WeightError if a lender is gone."""
        for link in self._links.values():
            link.check()

    def close(self) -> None:
        """Safe to call twice."""
        self._memory.close()
        for link in self._links.values():
            link.close()
        self._links = {}


def rank_key(rank: int) -> str:
    """Key of a trainer rank as a lender."""
    return f"rank {rank}"


def reader_key(reader: int) -> str:
    """Key of a reader that lends on."""
    return f"reader {reader}"


def describe(bucket: Bucket) -> str:
    return f"bucket {bucket.index} of trainer rank {bucket.sender}"


def _key_of(lender: str) -> str:
    return f"moerl/lender/{lender}"
