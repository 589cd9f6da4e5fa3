"""Where the sides of a push find each other: a store in the process of the first sender. The driver tells all its address, and the secret
without which nobody is heard there."""

import errno
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from moerl.cluster.run_secret import RunSecret
from moerl.cluster.secret_store import SecretStore
from moerl.types.errors import WeightError

JOIN_SECONDS = 120.0
"""Seconds for all sides of a push to meet, at most: one that is gone by then keeps the others from a new attempt for so long."""


class Deadline:
    """Time of one call to one side of a push, whatever it waits for."""

    def __init__(self, seconds: float):
        self._seconds, self._end = seconds, time.monotonic() + seconds

    def left(self) -> float:
        """Seconds, and some more when it has passed: what is there by then shall be found."""
        return max(self._end - time.monotonic(), 0.01)

    def has_passed(self) -> bool:
        return time.monotonic() > self._end

    def __str__(self) -> str:
        return f"{self._seconds:g} s"


class Rendezvous:
    """Every value is told once. WeightError if the store cannot be reached, or a value was not told in time."""

    def __init__(self, store: SecretStore):
        self.store, self.secret, self.host = store, store.secret, store.host
        self.address = f"{store.host}:{store.port}"

    @classmethod
    def open(cls, host: str, secret: RunSecret, deadline: Deadline) -> "Rendezvous":
        """In this process, on a free port of the address `host`, and on no other."""
        with explained(f"no store at {host}"):
            return cls(SecretStore.open(host, secret, deadline.left()))

    @classmethod
    def join(cls, address: str, secret: RunSecret, deadline: Deadline) -> "Rendezvous":
        host, _, port = address.rpartition(":")
        with explained(f"could not join the trainer at {address!r}"):
            return cls(SecretStore.join(host, int(port), secret, deadline.left()))

    def close(self) -> None:
        """Safe to call twice."""
        self.store.close()

    def tell(self, key: str, value: str) -> None:
        with explained(f"the store at {self.address} takes nothing"):
            self.store.set(key, value)

    def ask(self, key: str, deadline: Deadline | None = None) -> str:
        """`deadline` None: it was told before the address was."""
        with explained(f"the store at {self.address} has no {key!r}"):
            if deadline is not None:
                self.store.wait([key], timedelta(seconds=deadline.left()))
            return self.store.get(key).decode()

    def own_host(self) -> str:
        """This host's own address on the route to the store. A connected UDP socket sends nothing."""
        port = int(self.address.rpartition(":")[2])
        with explained(f"no route to the trainer at {self.address}"):
            family, kind, protocol, _, address = socket.getaddrinfo(self.host, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Errors of torch.distributed (RuntimeError) and of sockets, and addresses that are none, as WeightError."""
    try:
        yield
    except (RuntimeError, OSError, ValueError) as error:
        if isinstance(error, WeightError):
            raise
        fix = "see that every rollout server is alive and reaches the trainer's host"
        if any(os.strerror(number) in str(error) for number in (errno.EMFILE, errno.ENFILE)):
            fix = "this process, or its machine, may open no more files: a larger `ulimit -n`, of which moerl doctor tells"
        raise WeightError(f"{what} ({error}); {fix}") from error
