"""The process that runs verifiers: reads requests from its standard input, answers each term with a line of JSON.

    pool                              worker
      | number, Setup ----------------> builds every verifier
      | <------------------- {} or {"term", "error"}
      | number, VerifierInput ----------------> runs the terms in order
      | <------------------- one {"value", "extra"} or {"kind", "error"} per term; nothing more after the first error

Every line repeats the "number" of its request. Requests may come many at a time, and are read one at a time, not a byte further: no check
can find the number of a later one in this process. Once its verifiers are built the process shuts itself in (worker_sandbox.py). It is a
child of its supervisor, and ends with it even in the middle of a check.
"""

import json
import math
import os
import pickle
import resource
import struct
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from moerl.config.schema.custom_part import split_path
from moerl.config.schema.data_config import Isolation, RewardTerm
from moerl.rewards import worker_sandbox
from moerl.rewards.verifiers import PURE_KINDS, VERIFIERS, Verifier, VerifierInput

_LONGEST_MESSAGE = 2000
LONGEST_REASON = 5000
"""Characters of the reason why there is no score, with the place in code."""
LONGEST_NAME = 100
"""Characters of a number beside the score."""
_LENGTH = struct.Struct(">I")
_NUMBER_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """First request; those that follow are Checks."""

    terms: dict[str, RewardTerm]
    isolation: Isolation
    """Level of all these terms."""
    own: str
    """Directory that the worker may write."""
    memory_bytes: int
    """Address space that checks may take beyond what the verifiers need to exist."""


def framed(number: str, request: bytes) -> bytes:
    """Request as it is sent, after its length and its number of _NUMBER_BYTES."""
    return _LENGTH.pack(len(request)) + number.encode() + request


def main() -> None:
    """Answers until the pool closes the channel, also in the middle of a check: of one that nobody waits for any more."""
    with suppress(ConnectionError):
        _answer_all(*_take_over_channel())


def _answer_all(requests: IO[bytes], replies: "_Replies") -> None:
    """Raises ConnectionError once nobody reads the answers."""
    number, setup = _next_request(requests)
    verifiers = _build(setup.terms, replies, number)
    if verifiers is None:
        return
    _limit_memory(setup.memory_bytes)
    refusal = _isolate(setup)
    replies.send(number, refusal)
    if refusal:
        return
    is_used = False
    while True:
        try:
            number, check = _next_request(requests)
        except EOFError:
            return
        try:
            _run(verifiers, check, replies, number)
        except MemoryError as error:
            if is_used:  # by what earlier checks left, perhaps: it runs again in a worker of its own
                os._exit(1)
            replies.send(number, {"kind": "raised", "error": _message(error)})
        is_used = True


def _next_request(requests: IO[bytes]) -> tuple[str, Any]:
    """Raises EOFError when the channel is closed."""
    [length] = _LENGTH.unpack(_read(requests, _LENGTH.size))
    return _read(requests, _NUMBER_BYTES).decode(), pickle.loads(_read(requests, length))


def _read(requests: IO[bytes], num_bytes: int) -> bytes:
    read = bytearray()
    while len(read) < num_bytes:
        part = requests.read(num_bytes - len(read))
        if not part:
            raise EOFError
        read += part
    return bytes(read)


def _isolate(setup: Setup) -> dict[str, str]:
    """{} once this process is as isolated as its terms ask for, else the term that cannot do without, and what is missing."""
    if setup.isolation == "off":
        return {}
    impure = [name for name, term in setup.terms.items() if term.kind not in PURE_KINDS]
    lacking = worker_sandbox.missing()
    try:
        if not lacking:
            code, allows_network = _code(setup.terms), setup.isolation == "network"
            worker_sandbox.enter(own=Path(setup.own), code=code, allows_network=allows_network)
            return {}
    except (OSError, RuntimeError) as error:
        lacking = [str(error)]
    return {"term": impure[0], "error": f"isolation={setup.isolation}: {'; '.join(lacking)}"} if impure else {}


def _code(terms: Mapping[str, RewardTerm]) -> Iterator[Path]:
    """Directories of the users' functions."""
    for path in (term.path for term in terms.values() if term.path is not None):
        source, _ = split_path(path)
        if source.endswith(".py"):
            yield Path(source).parent
            continue
        package = sys.modules[source.partition(".")[0]]
        if (file := getattr(package, "__file__", None)) is not None:
            yield Path(file).parent
        else:  # a package without __init__.py may have several
            yield from map(Path, getattr(package, "__path__", ()))


class _Replies:
    """Answers of this process. A copy of it, forked by a check, that comes to answer ends; if C forked it, it says so."""

    def __init__(self, stream: IO[bytes]):
        self._stream, self._pid = stream, os.getpid()

    def send(self, number: str, message: Mapping[str, Any]) -> None:
        is_copy = os.getpid() != self._pid
        if is_copy:
            message = {"kind": "forged", "error": "a process that a check forked returned from it, and would have answered too"}
        self._stream.write(json.dumps({"number": number, **message}).encode() + b"\n")
        self._stream.flush()
        if is_copy:
            os._exit(1)


def _take_over_channel() -> tuple[IO[bytes], _Replies]:
    """Requests and replies on private descriptors; what a user's function prints goes to standard error.

    Programs that a check starts inherit neither, and its forks lose both: they have the number of the check in their memory.
    """
    requests, replies = os.fdopen(os.dup(0), "rb", buffering=0), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)

    def lose_channel() -> None:
        for stream in (requests, replies):
            os.dup2(nothing, stream.fileno(), inheritable=False)

    os.register_at_fork(after_in_child=lose_channel)
    return requests, _Replies(replies)


def _build(terms: Mapping[str, RewardTerm], replies: _Replies, number: str) -> dict[str, Verifier] | None:
    verifiers = {}
    for name, term in terms.items():
        try:
            verifiers[name] = VERIFIERS[term.kind](term)
        except BaseException as error:  # a user's module may raise anything while it is imported
            replies.send(number, {"term": name, "error": _message(error)})
            return None
    return verifiers


def _limit_memory(extra_bytes: int) -> None:
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[0])
    limit = pages * resource.getpagesize() + extra_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _run(verifiers: Mapping[str, Verifier], check: VerifierInput, replies: _Replies, number: str) -> None:
    """Raises MemoryError, and ConnectionError if nobody reads the answers, alone."""
    for verifier in verifiers.values():
        try:
            answer = _answer(verifier(check))
        except MemoryError:
            raise
        except BaseException as error:  # whatever a verifier raises marks this sample only
            answer = {"kind": "raised", "error": _message(error)}
        replies.send(number, answer)
        if "error" in answer:
            return


def _answer(verdict: Any) -> dict[str, Any]:
    if not isinstance(verdict, Mapping):
        score, extra = verdict, {}
    elif "score" not in verdict:
        return {"kind": "not_a_number", "error": f'returned a mapping without "score": {_short(repr(verdict))}'}
    else:
        score = verdict["score"]
        extra = {_printable(str(key))[:LONGEST_NAME]: _number(value) for key, value in verdict.items() if key != "score"}
    value = _number(score)
    if value is None:
        return {"kind": "not_a_number", "error": f"returned {_short(repr(score))}, which is not a finite number"}
    return {"value": value, "extra": {key: number for key, number in extra.items() if number is not None}}


def _number(value: Any) -> float | None:
    """Numbers of Python, and scalars of numpy and torch, if they are finite."""
    try:
        scalar = value.item() if hasattr(value, "item") else value
        return float(scalar) if isinstance(scalar, (int, float)) and math.isfinite(scalar) else None
    except (TypeError, ValueError, RuntimeError, OverflowError):  # several numbers, an `item` of another kind, an int beyond all floats
        return None


def _message(error: BaseException) -> str:
    """With the innermost place in code, which in a user's function is what it takes to mend it."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    try:
        text = str(error)
    except Exception as other:  # a class of the user's
        text = f"its text cannot be made: {type(other).__name__}"
    said = _short(f"{type(error).__name__}: {text}" if text else type(error).__name__)
    return f"{said} (at {_short(f'{place.filename}:{place.lineno} in {place.name}: {place.line}')})"


def _printable(text: str) -> str:
    """Halves of surrogate pairs, which JSON in a response can name, as their escapes: no file could hold them."""
    return text.encode("utf-8", errors="backslashreplace").decode()


def _short(text: str) -> str:
    text = _printable(text)
    return text if len(text) <= _LONGEST_MESSAGE else text[:_LONGEST_MESSAGE] + "..."
