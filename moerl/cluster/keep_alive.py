"""Connections that idle for minutes, and must not idle for ever."""

import socket
from typing import Any


def keep_alive(connection: Any) -> None:
    """A node that loses its power says nothing: after half a minute the TCP `connection` counts as closed."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
