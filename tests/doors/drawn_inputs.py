"""Inputs for fuzzers: what a program has written, changed at random, in its text and in its values."""

import json
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import shards

CPU_SECONDS = 5.0
"""An input that takes longer counts over something that somebody wrote."""

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 3, 2**31, 2**63, 10**9, 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"), "", "x", "a" * 300, "\ud800",
    "\0", "../x", "/etc/passwd", "F32", "BF16", [], [1], ["128"], [128.0], [[1, 2]], {}, {"a": 1}, {"data_offsets": [0, 4]}, [0, 4], [4, 0],
    [-4, 0],
]  # fmt: skip
SNIPPETS = [
    b"\xff", b"\x00", b"\xef\xbb\xbf", b"\xff\xfe", b"[" * 3000, b'{"a":' * 3000, b"9" * 5000, b"&a ", b"*a", b"!!binary ",
    b"!!python/object:os.system ", b"\n- ", b": ", b"null: 2\n", b"\t", b"'", b'"', b"}", b"]", b"NaN", b"1e999", b"\\ud800",
    b"# @pack\n", b"<<: *a\n", b"? [a]\n", b"---\n",
]  # fmt: skip


def check_cases(name: str, count: int, holds: Callable[[random.Random], None]) -> None:
    """`holds` for each of `count` cases. Raises what it raises, and says of which case."""
    seed = shards.fuzzing_seed()
    for number in range(count):
        try:
            with limited():
                holds(random.Random(f"{seed}/{name}/{number}"))
        except BaseException as error:
            error.add_note(f"case {number} of {name}, MOERL_FUZZ_SEED={seed}")
            raise


@contextmanager
def limited() -> Iterator[None]:
    began = time.process_time()

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise AssertionError(f"has computed for {time.process_time() - began:.1f} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS, 0.5)  # again: one that is raised inside a callback is lost
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def other_bytes(draw: random.Random, data: bytes) -> bytes:
    """A few bytes lost, doubled, flipped, or foreign ones in between."""
    for _ in range(draw.choice([1, 1, 2, 5])):
        at, until = sorted(draw.randrange(len(data) + 1) for _ in range(2))
        until = min(until, at + draw.choice([1, 8, 100]))
        middle = draw.choice([b"", data[at:until] * 2, bytes(draw.randrange(256) for _ in range(3)), draw.choice(SNIPPETS)])
        data = data[:at] + middle + data[until:]
    return data


def other_value(draw: random.Random, value: Any) -> Any:
    """The same with one value somewhere in it replaced, left out, or under another name."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        name = draw.choice(list(value))
        rest = {each: held for each, held in value.items() if each != name}
        match draw.randrange(8):
            case 0:
                return rest
            case 1:
                return rest | {draw.choice(["", "x", "a" * 300, "\ud800", *value]): value[name]}
            case _:
                return value | {name: other_value(draw, value[name])}
    if isinstance(value, list) and value and draw.random() < 0.7:
        at = draw.randrange(len(value))
        return [*value[:at], other_value(draw, value[at]), *value[at + 1 :]]
    return draw.choice(VALUES)


def other_json(draw: random.Random, data: bytes) -> bytes:
    if draw.random() < 0.3:
        return other_bytes(draw, data)
    value = json.loads(data)
    for _ in range(draw.choice([1, 1, 2, 3])):
        value = other_value(draw, value)
    return json.dumps(value).encode()
