"""Store of a run's own, at which processes leave values for each other: torch's interface, for those that have proven the run's secret.

torch's TCPStore listens on every address of the host, and asks nobody who he is. A process group is built on this one as on that: C++ calls
the methods from threads of its own, which is why a call has a connection to itself.

    request, answer: length | (length, bytes) of each part       a request's first part is the verb, an answer's whether it is one
"""

import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError, Store

from moerl.cluster.run_secret import RunSecret
from moerl.cluster.secret_listener import SecretListener, connect_proven

MAX_MESSAGE_BYTES = 2**24
_LENGTH = struct.Struct("<I")
_GRACE_SECONDS = 5.0
"""How much longer than it may wait an answer may be on its way."""

Ask = Callable[[Sequence[bytes], float], list[bytes]]
"""(request, seconds that the answer may take): its answer."""


class SecretStore(Store):
    """Values by key, in the process that opened it. C++ calls a store only while Python holds it: whoever builds a group on one keeps it.

    DistStoreError: a value did not come in time. DistNetworkError: that process is gone.
    """

    def __init__(self, ask: Ask, close: Callable[[], None], host: str, port: int, secret: RunSecret, seconds: float):
        super().__init__()
        self.set_timeout(timedelta(seconds=seconds))
        self._ask, self._close = ask, close
        self.host, self.port, self.secret = host, port, secret

    @classmethod
    def open(cls, host: str, secret: RunSecret, seconds: float) -> "SecretStore":
        """In this process, on a free port of this one address. `seconds`: for whatever says no other time."""
        server = _StoreServer(host, secret)
        return cls(server.answer, server.close, host, server.port, secret, seconds)

    @classmethod
    def join(cls, host: str, port: int, secret: RunSecret, seconds: float) -> "SecretStore":
        """OSError, at the latest after `seconds`, if it is not there, or one of the two has not the `secret`."""
        client = _StoreClient(host, port, secret, seconds)
        return cls(client.ask, client.close, host, port, secret, seconds)

    def set(self, key: str, value: str | bytes) -> None:
        self._told(b"set", key.encode(), value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        """Waits for it."""
        return self._told(b"get", *self._patience(None), key.encode())[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._told(b"wait", *self._patience(timeout), *(key.encode() for key in keys), timeout=timeout)

    def check(self, keys: list[str]) -> bool:
        return self._told(b"check", *(key.encode() for key in keys)) == [b"1"]

    def add(self, key: str, amount: int) -> int:
        return int(self._told(b"add", key.encode(), str(amount).encode())[0])

    def clone(self) -> Store:
        """Itself: threads may share it."""
        return self

    def close(self) -> None:
        """Safe to call twice."""
        self._close()

    def _patience(self, timeout: timedelta | None) -> tuple[bytes]:
        return (repr(self._seconds(timeout)).encode(),)

    def _seconds(self, timeout: timedelta | None) -> float:
        own: timedelta = self.timeout  # type: ignore[attr-defined]  # absent from torch's stubs
        return (own if timeout is None else timeout).total_seconds()

    def _told(self, *request: bytes, timeout: timedelta | None = None) -> list[bytes]:
        verdict, *parts = self._ask(request, self._seconds(timeout) + _GRACE_SECONDS)
        if verdict != b"ok":
            raise DistStoreError(f"{self.host}:{self.port}: {parts[0].decode(errors='replace')}")
        return parts


class _StoreServer:
    def __init__(self, host: str, secret: RunSecret):
        self._values: dict[bytes, bytes] = {}
        self._awaited: dict[bytes, threading.Event] = {}
        self._lock, self._is_closed = threading.Lock(), False
        self._connections: set[socket.socket] = set()
        self._listener = SecretListener(host, secret, self._serve, name="store")
        self.port = self._listener.port

    def close(self) -> None:
        """Safe to call twice."""
        self._listener.close()
        with self._lock:
            self._is_closed = True
            for event in self._awaited.values():
                event.set()
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def answer(self, request: Sequence[bytes], seconds: float) -> list[bytes]:
        """In this process; `seconds` is what the request says."""
        verb, *parts = request
        try:
            return [b"ok", *getattr(self, _VERBS[verb])(*parts)]
        except (DistStoreError, KeyError, TypeError, ValueError) as error:
            return [b"no", str(error).encode()]

    def _serve(self, connection: socket.socket) -> None:
        with self._lock:
            if self._is_closed:
                connection.close()
                return
            self._connections.add(connection)
        try:
            while request := _receive(connection):
                _send(connection, self.answer(request, 0.0))
        except (OSError, ValueError):
            pass  # it is gone, or says what no store is told
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _set(self, key: bytes, value: bytes) -> list[bytes]:
        with self._lock:
            self._put(key, value)
        return []

    def _get(self, seconds: bytes, key: bytes) -> list[bytes]:
        self._wait(seconds, key)
        return [self._values[key]]

    def _wait(self, seconds: bytes, *keys: bytes) -> list[bytes]:
        end = time.monotonic() + min(float(seconds), threading.TIMEOUT_MAX)
        for key in keys:
            with self._lock:
                if key in self._values:
                    continue
                event = self._awaited.setdefault(key, threading.Event())
            if not event.wait(max(end - time.monotonic(), 0)) or self._is_closed:
                raise DistStoreError(f"wait timeout after {float(seconds):g} s, key: {key.decode(errors='replace')}")
        return []

    def _check(self, *keys: bytes) -> list[bytes]:
        return [b"1" if all(key in self._values for key in keys) else b"0"]

    def _add(self, key: bytes, amount: bytes) -> list[bytes]:
        with self._lock:
            value = str(int(self._values.get(key, b"0")) + int(amount)).encode()
            self._put(key, value)
        return [value]

    def _put(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        if (event := self._awaited.pop(key, None)) is not None:
            event.set()


_VERBS = {b"set": "_set", b"get": "_get", b"wait": "_wait", b"check": "_check", b"add": "_add"}


class _StoreClient:
    """Connections to a store, each in use by one call at a time."""

    def __init__(self, host: str, port: int, secret: RunSecret, seconds: float):
        self._host, self._port, self._secret = host, port, secret
        self._lock, self._is_closed = threading.Lock(), False
        self._idle = [connect_proven(host, port, secret, seconds)]

    def ask(self, request: Sequence[bytes], seconds: float) -> list[bytes]:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        try:
            if connection is None:
                connection = connect_proven(self._host, self._port, self._secret, seconds)
            connection.settimeout(seconds)
            _send(connection, request)
            if (answer := _receive(connection)) is None:
                raise ConnectionResetError("Connection closed by peer")
        except (OSError, ValueError) as error:
            if connection is not None:
                connection.close()
            raise DistNetworkError(f"the store at {self._host}:{self._port} does not answer: {error}") from error
        with self._lock:
            if self._is_closed:
                connection.close()
            else:
                self._idle.append(connection)
        return answer

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for connection in self._idle:
                connection.close()
            self._idle = []


def _send(connection: socket.socket, parts: Sequence[bytes]) -> None:
    body = b"".join(_LENGTH.pack(len(part)) + part for part in parts)
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"{len(body)} bytes at once, at most {MAX_MESSAGE_BYTES}")
    connection.sendall(_LENGTH.pack(len(body)) + body)


def _receive(connection: socket.socket) -> list[bytes] | None:
    """None: the other side has hung up. ValueError for what is no message."""
    with connection.makefile("rb") as file:  # which reads nothing of another message: a side sends one and waits for its answer
        head = file.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack(head)
        if not 0 < length <= MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {length} bytes")
        body = file.read(length)
    return _parts(body) if len(body) == length else None


def _parts(body: bytes) -> list[bytes]:
    parts, start = [], 0
    while start < len(body):
        if start + _LENGTH.size > len(body):
            raise ValueError("a message that ends in a length")
        (length,) = _LENGTH.unpack_from(body, start)
        start += _LENGTH.size + length
        if start > len(body):
            raise ValueError("a part that is longer than its message")
        parts.append(body[start - length : start])
    return parts
