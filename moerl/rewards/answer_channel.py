"""The pool's end of a worker's channel: what may come over it, and nothing else.

A check carries a random number that each of its answers repeats. Whatever is not the next answer of the check under way is a forgery: by
what a verifier ran, or by what it left running. Then nobody can tell which answer is the worker's own, so that its process has to go.
"""

import asyncio
import json
import math
import re
import socket
from typing import Any

from moerl.rewards.reward_worker import LONGEST_NAME, LONGEST_REASON

_LONGEST_ANSWER = 2**20
_SHAPES = ({"value", "extra"}, {"kind", "error"})
_VERIFIER_ERRORS = ("raised", "not_a_number")


class ForgedAnswer(Exception):
    """Something on the channel that is not the next answer of the check under way."""


class AnswerChannel:
    """Two sockets: requests go out by one, lines come in by the other."""

    def __init__(self, requests: socket.socket, answers: socket.socket):
        for each in (requests, answers):
            each.setblocking(False)
        requests.shutdown(socket.SHUT_RD)  # what is written there would never be read, and block its writer
        self._requests, self._answers = requests, answers
        self._rest = b""

    async def send(self, message: bytes) -> None:
        """Raises ForgedAnswer if something has come that nobody asked for; ConnectionError if the worker has ended."""
        self.require_silence()
        await asyncio.get_running_loop().sock_sendall(self._requests, message)

    async def receive(self, number: str) -> dict[str, Any]:
        """The next message with this number, without it. Raises ForgedAnswer, or ConnectionError if the worker has ended."""
        message = _message(await self._line())
        if message.pop("number", None) != number:
            raise ForgedAnswer("an answer with the number of another check, or none")
        return message

    def require_silence(self) -> None:
        """Raises ForgedAnswer if anything has come after the last line that was read, ConnectionError if the worker has ended."""
        try:
            stray = self._rest if self._rest else self._answers.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        if stray:
            raise ForgedAnswer("more came than the answers of the check")
        raise ConnectionError("the worker ended")

    def close(self) -> None:
        self._requests.close()
        self._answers.close()

    async def _line(self) -> bytes:
        while b"\n" not in self._rest:
            if len(self._rest) > _LONGEST_ANSWER:
                raise ForgedAnswer(f"a line of more than {_LONGEST_ANSWER} bytes")
            received = await asyncio.get_running_loop().sock_recv(self._answers, 65536)
            if not received:
                raise ConnectionError("the worker ended")
            self._rest += received
        line, _, self._rest = self._rest.partition(b"\n")
        return line


def checked_answer(message: dict[str, Any]) -> dict[str, Any]:
    """{"value", "extra"} or {"kind", "error"} of one term, as a worker's own code makes it; else ForgedAnswer."""
    if message.get("kind") == "forged" and _is_text(message.get("error"), LONGEST_REASON):
        raise ForgedAnswer(message["error"])
    if set(message) not in _SHAPES:
        raise ForgedAnswer("a line that is no answer of a worker")
    if "kind" in message:
        is_sound = message["kind"] in _VERIFIER_ERRORS and _is_text(message["error"], LONGEST_REASON)
    else:
        is_sound = isinstance(message["extra"], dict) and all(map(_is_finite, (message["value"], *message["extra"].values())))
        is_sound = is_sound and all(_is_text(name, LONGEST_NAME) for name in message["extra"])
    if not is_sound:
        raise ForgedAnswer("an answer whose values no worker sends")
    return message


def _message(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ForgedAnswer(f"a line that is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise ForgedAnswer("a line that is not a JSON object")
    return message


def _is_finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _is_text(value: Any, most: int) -> bool:
    """Whether files can hold it: JSON may name halves of surrogate pairs."""
    return isinstance(value, str) and len(value) <= most and not re.search("[\ud800-\udfff]", value)
