"""Sockets: ports that nobody listens on, for programs that open them some time later, and connections that idle for minutes."""

import random
import socket
from pathlib import Path
from typing import Any

from moerl.types.errors import EngineError

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST, _NUM_TRIES = 20_000, 200


def free_ports(count: int, *, fix: str = "give rollout.layout.port") -> int:
    """The first of `count`, below those that the system gives to connections: none of them is taken meanwhile but by another who chooses
    one. EngineError, with the `fix`, where there are none."""
    highest = int(_RANGE.read_text().split()[0]) - count if _RANGE.exists() else 32_768 - count
    # Not the generator that a run seeds: two runs on a node would choose the same.
    chance = random.SystemRandom()
    for _ in range(_NUM_TRIES):
        first = chance.randint(min(_LOWEST, highest), highest)
        if all(_is_free(port) for port in range(first, first + count)):
            return first
    raise EngineError(f"no {count} ports in a row are free below {highest + count} on this node; {fix}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def keep_alive(connection: Any) -> None:
    """A node that loses its power says nothing: after half a minute the TCP `connection` counts as closed."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
