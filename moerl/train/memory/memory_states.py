"""Where a trainer's memory is, as one state machine: every call runs in one state, and what it needs is on the device by then.

    asleep --wake--> scoring <--> training      sleep: back to asleep from either; shed: to scoring from training

The caller says wake, shed and sleep (moerl/residency.py: when). From scoring to training the machine moves by itself: log-probs
and export need parameters only, update, save and load everything. What a state holds on the device follows from train.offload.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

from moerl.types.errors import ResidencyError
from moerl.types.stats import MemoryStats

State = Literal["training", "scoring", "asleep"]
Kind = Literal["parameters", "gradients", "optimizer", "reference"]
Offload = Literal["none", "optimizer", "all"]
Call = Literal["logprobs", "reference_logprobs", "values", "export", "update", "save", "load"]

KINDS: tuple[Kind, ...] = get_args(Kind)
"""gradients: the buffers they add up in. optimizer: master weights and moments. reference: the frozen copy of the initial weights."""

MUON_ROUND_ELEMENTS = 2**25
"""Elements of matrices that a rank makes orthogonal at a time, or one matrix: what Muon's exchange and products hold beside its states."""

_NEEDS: Mapping[Call, State] = {
    "logprobs": "scoring",
    "reference_logprobs": "scoring",
    "values": "scoring",
    "export": "scoring",
    "update": "training",
    "save": "training",
    "load": "training",
}
_EVERYTHING = frozenset(KINDS)
_WEIGHTS: frozenset[Kind] = frozenset({"parameters", "reference"})
_NOTHING: frozenset[Kind] = frozenset()
ON_DEVICE: Mapping[Offload, Mapping[State, frozenset[Kind]]] = {
    "none": {"training": _EVERYTHING, "scoring": _EVERYTHING, "asleep": _EVERYTHING},
    "optimizer": {"training": _EVERYTHING, "scoring": _WEIGHTS, "asleep": _WEIGHTS},
    "all": {"training": _EVERYTHING, "scoring": _WEIGHTS, "asleep": _NOTHING},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    device: int
    host: int
    """Bytes of copies, which stay allocated for the next time."""


class MemoryStates:
    """Starts in training, with everything on the device."""

    def __init__(self, offload: Offload, move: Callable[[State, State], None], measure: Callable[[], Mapping[Kind, Bytes]]):
        """`move(before, after)` is called when the two states hold different kinds; `measure` says what is where now."""
        self._places, self._move, self._measure = ON_DEVICE[offload], move, measure
        self.state: State = "training"
        self._running: Call | None = None
        self._seconds: dict[str, float] = {}
        self._bytes: dict[State, Mapping[Kind, Bytes]] = {}

    def wake(self) -> int:
        """Bytes that came to the device."""
        self._check("wake", is_legal=self.state == "asleep")
        return self._enter("scoring")

    def shed(self) -> int:
        """Keep only what scoring and export need. Bytes that left the device; so for sleep."""
        self._check("shed", is_legal=self.state != "asleep" and self._running is None)
        return -self._enter("scoring")

    def sleep(self) -> int:
        self._check("sleep", is_legal=self.state != "asleep" and self._running is None)
        return -self._enter("asleep")

    @contextmanager
    def running(self, call: Call) -> Iterator[None]:
        """Context in which what `call` needs is on the device inside, and no other call may begin."""
        self._check(call, is_legal=self.state != "asleep" and self._running is None)
        self._enter(_NEEDS[call])
        self._running = call
        try:
            yield
        finally:
            self._running = None

    def stats(self) -> MemoryStats:
        """Seconds of the transitions since the last call; bytes as last seen in each state."""
        self._bytes[self.state] = self._measure()
        seconds, self._seconds = self._seconds, {}
        return MemoryStats(
            device_bytes={state: {kind: held.device for kind, held in kinds.items()} for state, kinds in self._bytes.items()},
            host_bytes={kind: held.host for kind, held in self._bytes[self.state].items()},
            transition_seconds=seconds,
        )

    def legal_calls(self) -> tuple[str, ...]:
        if self.state == "asleep":
            return ("wake",)
        return () if self._running is not None else ("shed", "sleep", *_NEEDS)

    def _check(self, call: str, *, is_legal: bool) -> None:
        if is_legal:
            return
        doing = self.state if self._running is None else f"{self.state}, running {self._running}"
        legal = ", ".join(self.legal_calls())
        now = f"legal now: {legal}" if legal else f"no call is legal before {self._running} has ended"
        raise ResidencyError(f"{call}: the trainer is {doing}; {now}")

    def _enter(self, after: State) -> int:
        """Bytes by which the device holds more."""
        before, difference = self.state, 0
        if self._places[before] != self._places[after]:
            held, begun = _on_device(self._measure()), time.perf_counter()
            self._move(before, after)
            name = f"{before}_to_{after}"
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - begun
            self._bytes[after] = self._measure()
            difference = _on_device(self._bytes[after]) - held
        self.state = after
        return difference


def _on_device(kinds: Mapping[Kind, Bytes]) -> int:
    return sum(held.device for held in kinds.values())
