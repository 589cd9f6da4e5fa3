"""Secret of a run. Every port that its processes open asks for it, and whoever cannot prove it is a stranger.

The driver makes it. Servers read it from the pipe that is their stdin, Ray's actors get it as an argument: it is in no argument list,
environment, log or report. The sides of a push have one of their own, made anew whenever they meet, which receivers get with the offer.
HTTP carries it as a bearer token; on other connections both sides prove that they have it, and it is not sent:

    accepting side              connecting side
      | nonce a --------------------->
      <----------- nonce b, HMAC(a, b)
      | HMAC(b, a) ------------------>
"""

import hmac
import secrets
import socket
import time
from dataclasses import dataclass, field

_NONCE_BYTES = 32
_PROOF_BYTES = 32
_SCHEME = "Bearer "


class StrangerError(ConnectionError):
    """Other side of a connection, which does not have the run's secret or took too long to prove it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSecret:
    """Key that the processes of one run share."""

    key: str = field(repr=False)

    @classmethod
    def new(cls) -> "RunSecret":
        return cls(key=secrets.token_hex())

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every HTTP request."""
        return {"Authorization": f"{_SCHEME}{self.key}"}

    def admits(self, authorization: str | None) -> bool:
        """Whether a request with this value of the header is the run's own; takes as long whatever is wrong with it."""
        return hmac.compare_digest((authorization or "").encode(), f"{_SCHEME}{self.key}".encode())

    def examine(self, connection: socket.socket, seconds: float) -> None:
        """Accepting side of a connection: returns when the other one has proven itself. StrangerError, at the latest after `seconds`."""
        end, nonce = time.monotonic() + seconds, secrets.token_bytes(_NONCE_BYTES)
        _send(connection, nonce, end)
        answer = _receive(connection, _NONCE_BYTES + _PROOF_BYTES, end)
        theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
        if not hmac.compare_digest(proof, self._proof(b"connects", nonce, theirs)):
            raise StrangerError("the other side does not have the run's secret")
        _send(connection, self._proof(b"accepts", theirs, nonce), end)

    def prove(self, connection: socket.socket, seconds: float) -> None:
        """Connecting side: returns when both have proven themselves. StrangerError, at the latest after `seconds`."""
        end, nonce = time.monotonic() + seconds, secrets.token_bytes(_NONCE_BYTES)
        theirs = _receive(connection, _NONCE_BYTES, end)
        _send(connection, nonce + self._proof(b"connects", theirs, nonce), end)
        if not hmac.compare_digest(_receive(connection, _PROOF_BYTES, end), self._proof(b"accepts", nonce, theirs)):
            raise StrangerError("whoever listens there does not have the run's secret")

    def _proof(self, side: bytes, first: bytes, second: bytes) -> bytes:
        """`side` keeps one side's proof from being played back as the other's."""
        return hmac.digest(self.key.encode(), side + first + second, "sha256")


def _send(connection: socket.socket, content: bytes, end: float) -> None:
    _limit(connection, end)
    try:
        connection.sendall(content)
    except OSError as error:
        raise StrangerError(f"the other side took no proof ({error})") from error


def _receive(connection: socket.socket, num_bytes: int, end: float) -> bytes:
    content = b""
    while len(content) < num_bytes:
        _limit(connection, end)
        try:
            chunk = connection.recv(num_bytes - len(content))
        except OSError as error:
            raise StrangerError(f"the other side did not prove itself ({error})") from error
        if not chunk:
            raise StrangerError("the other side left before it had proven itself")
        content += chunk
    return content


def _limit(connection: socket.socket, end: float) -> None:
    left = end - time.monotonic()
    if left <= 0:
        raise StrangerError("the other side took too long to prove itself")
    connection.settimeout(left)
