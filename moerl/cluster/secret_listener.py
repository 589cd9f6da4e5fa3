"""Port of a run's own processes: what connects to it is heard when it has proven the run's secret, and strangers hold nobody up.

Every connection is examined in a thread of its own. There are at most MAX_STRANGERS at a time: one more ends the oldest, which a process of
the run that was in their midst answers by connecting again.
"""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from moerl.cluster.run_secret import RunSecret, StrangerError
from moerl.cluster.sockets import keep_alive

MAX_STRANGERS = 256
PROOF_SECONDS = 5.0
_ADMIT_AGAIN_SECONDS = 0.05
"""After no connection could be taken: a process has only so many files and threads."""
_NUM_TRIES = 5


class SecretListener:
    """Listens on one address, for as long as it is open."""

    def __init__(self, host: str, secret: RunSecret, serve: Callable[[socket.socket], None], *, name: str):
        """`serve` gets each connection that has proven the `secret`, in its thread, and owns it. `name` of the threads. OSError: `host` is
        no address of this one."""
        self._secret, self._serve, self._name = secret, serve, name
        self._strangers: dict[socket.socket, None] = {}
        self._lock, self._is_closed = threading.Lock(), False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server((host, 0), family=family, backlog=1024)
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept_all, name=name, daemon=True).start()

    def close(self) -> None:
        """Whom it has admitted stays connected. Safe to call twice."""
        with self._lock:
            self._is_closed = True
            with suppress(OSError):
                self._server.shutdown(socket.SHUT_RDWR)  # ends the accept of the thread
            self._server.close()
            for stranger in self._strangers:
                _hang_up(stranger)

    def _accept_all(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._server.accept()
            except OSError:
                if not self._is_closed:
                    time.sleep(_ADMIT_AGAIN_SECONDS)
                continue
            self._receive(connection)

    def _receive(self, connection: socket.socket) -> None:
        with self._lock:
            if self._is_closed:
                connection.close()
                return
            if len(self._strangers) >= MAX_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                _hang_up(oldest)
            self._strangers[connection] = None
            try:
                threading.Thread(target=self._examine, args=(connection,), name=self._name, daemon=True).start()
            except RuntimeError:
                del self._strangers[connection]
                connection.close()

    def _examine(self, connection: socket.socket) -> None:
        try:
            self._secret.examine(connection, PROOF_SECONDS)
            _use(connection)
        except OSError:
            connection.close()
            return
        finally:
            with self._lock:
                self._strangers.pop(connection, None)
        self._serve(connection)


def connect_proven(host: str, port: int, secret: RunSecret, seconds: float) -> socket.socket:
    """Connection to a SecretListener, on which both sides have proven the `secret`. OSError, at the latest after `seconds`."""
    end = time.monotonic() + seconds
    for tries_left in reversed(range(_NUM_TRIES)):
        connection = socket.create_connection((host, port), timeout=max(end - time.monotonic(), 0.01))
        try:
            secret.prove(connection, max(end - time.monotonic(), 0.01))
        except StrangerError:
            connection.close()
            if tries_left == 0 or time.monotonic() > end:
                raise
        else:
            _use(connection)
            return connection
    raise AssertionError("the last try returns or raises")


def _use(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(connection)


def _hang_up(connection: socket.socket) -> None:
    """Whoever waits in it is told; that one closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
