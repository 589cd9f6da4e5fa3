"""Sockets: ports that nobody listens on, for programs that open them some time later, connections that idle for minutes, and contexts of
TLS, each made from files in the process that uses it: paths travel, contexts cannot."""

import random
import socket
import ssl
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


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Context of a TLS server that shows `certificate`. EngineError if this node's files cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password=lambda: "")  # without, OpenSSL asks the terminal for a passphrase
    except (OSError, ValueError) as error:
        raise EngineError(_unusable(f"rollout.tls.certificate = {str(certificate)!r}, rollout.tls.key = {str(key)!r}", error)) from error
    return context


def client_context(authority: Path | None) -> ssl.SSLContext | None:
    """Context of a client that trusts certificates of `authority` alone, for the host that it asked; None without one: plain HTTP.
    EngineError if this node's file cannot be used."""
    if authority is None:
        return None
    try:
        return ssl.create_default_context(cafile=authority)
    except (OSError, ValueError) as error:
        raise EngineError(_unusable(f"rollout.tls.authority = {str(authority)!r}", error)) from error


def _unusable(files: str, error: Exception) -> str:
    return f"{files}: cannot be used on this node: {error}; every node must have the same files there, readable by the run"
