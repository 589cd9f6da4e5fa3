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
from moerl.cluster.sockets import keep_alive
from moerl.types.errors import WeightError
from moerl.types.push import Bucket
from moerl.weights.transport.disk_transport import DiskReader
from moerl.weights.transport.rendezvous import TOKEN_KEY, Deadline, Rendezvous, explained
from moerl.weights.transport.shared_memory import SharedReader

_HELLO_SECONDS = 5.0


class Link:
    """A connection to `peer`, by its name in errors. Both say lines."""

    def __init__(self, connection: socket.socket, peer: str = "a reader"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(connection)
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
            line = self._lines.readline()
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
        self._readers, self._token = frozenset(readers), rendezvous.ask(TOKEN_KEY)
        self._changed = threading.Condition()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with explained(f"no port on {host} for readers of {name}"):
            self._server = socket.create_server((host, 0), family=family, backlog=1024)
        port = self._server.getsockname()[1]
        # From now on, lest the system's queue of those that wait to be accepted, 128 on old kernels, keeps readers from connecting.
        threading.Thread(target=self._accept_all, name=f"readers of {name}", daemon=True).start()
        rendezvous.tell(_key_of(key), json.dumps({"host": host, "port": port, "name": name}))

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
        """Returns when all have read what was lent from that slot last. Slots are waited for in the order in which they were lent."""
        if slot not in self._lent:
            return
        bucket, readers = self._lent.pop(slot)
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
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # ends the accept of the thread
        self._server.close()
        with self._changed:
            self._readers = frozenset()
            for link in self._links.values():
                link.close()
            self._links = {}

    def _missing(self) -> frozenset[int]:
        return self._readers - set(self._links)

    def _accept_all(self) -> None:
        while self._missing():
            try:
                connection, _ = self._server.accept()
            except OSError:
                return  # it was closed
            try:
                link = Link(connection)
                hello = json.loads(link.hear("its name", Deadline(_HELLO_SECONDS)))
                if hello["token"] != self._token:
                    raise ValueError("of another push")
                link.peer, reader = hello["name"], hello["reader"]
            except (WeightError, OSError, ValueError, TypeError, KeyError):  # whoever else found the port, or is gone already
                connection.close()
                continue
            with self._changed:
                if reader in self._readers:
                    self._links[reader] = link
                    self._changed.notify_all()
                else:
                    link.close()


class Borrower:
    """Reads buckets where lenders have them."""

    def __init__(self, memory: SharedReader | DiskReader, lender_of: Callable[[Bucket], str]):
        """`lender_of`: the key of the one that lends a bucket."""
        self._memory, self._lender_of = memory, lender_of
        self._links: dict[str, Link] = {}

    def join(self, rendezvous: Rendezvous, lenders: Iterable[str], *, reader: int, name: str, deadline: Deadline) -> None:
        """Connects to these, by their keys; they need not have accepted yet."""
        hello = json.dumps({"token": rendezvous.ask(TOKEN_KEY), "reader": reader, "name": name})
        for key in sorted(set(lenders)):
            found = json.loads(rendezvous.ask(_key_of(key), deadline))
            with explained(f"no connection to {found['name']} at {found['host']}:{found['port']}"):
                connection = socket.create_connection((found["host"], found["port"]), timeout=deadline.left())
            link = self._links[key] = Link(connection, found["name"])
            link.say(hello)

    def fetch(self, bucket: Bucket, deadline: Deadline) -> torch.Tensor:
        """uint8 [bucket.num_bytes], until `done`."""
        link = self._links[self._lender_of(bucket)]
        sender, index, source = link.hear(describe(bucket), deadline).split(" ", 2)
        if (int(sender), int(index)) != (bucket.sender, bucket.index):
            came = f"bucket {index} of trainer rank {sender}"
            raise WeightError(f"{came} came from {link.peer} in place of {describe(bucket)}: a sender drops buckets of its share")
        return self._memory.fetch(bucket, source)

    def done(self, bucket: Bucket) -> None:
        """It is installed here."""
        self._links[self._lender_of(bucket)].say("")

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
