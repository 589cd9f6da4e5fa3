"""The doctor on one node: gathers facts, answers the head's clock, tries a neighbour's name, starts the node's ranks.

Everything goes through the head's store: facts/NODE, clock/NODE/ROUND, plan, reached/NODE, measured/RANK, failed/RANK, done/NODE.
"""

import ipaddress
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from pydantic import TypeAdapter

from moerl.cluster.descendants import end_with_parent
from moerl.cluster.run_secret import RunSecret
from moerl.cluster.secret_store import SecretStore
from moerl.doctor.checks.expected import Expectations
from moerl.doctor.checks.node_facts import NodeFacts, gather
from moerl.doctor.measure_bandwidth import JOB, RankJob
from moerl.hardware.network_settings import Setting, read_nccl_files, variables
from moerl.types.errors import MoerlError

CLOCK_ROUNDS = 5
_CONNECT_SECONDS = 5.0
_NET_CHANNELS = {"NCCL_NCHANNELS_PER_NET_PEER": "4"}
"""Channels of the doctor's ranks, unless it is given. NCCL takes fewer the more ranks there are, as if each sent to all others at the same
time (ncclTopoGetNchannels, src/graph/paths.cc); here each has one peer, and one channel does not fill its port."""
_POLL_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePlace:
    """Where a node stands among the others."""

    index: int
    name: str
    host: str
    """Address of the head's store."""
    port: int
    secret: str = field(repr=False)
    """Key of the RunSecret that the store asks for."""
    num_nodes: int
    expected: Expectations
    seconds: float
    """How long one phase may take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    facts: NodeFacts
    port: int
    """On which the node listens, for others to try its name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Task of the nodes once all that came have said what they are."""

    neighbours: dict[int, tuple[str, int]]
    """Node -> (host name, port) of the one it tries to reach."""
    ranks: tuple[tuple[int, ...], ...]
    """Ranks of every node that measures; empty: nothing is measured."""
    on_gpus: bool
    num_bytes: int


PLACE, HELLO, PLAN = TypeAdapter(NodePlace), TypeAdapter(Hello), TypeAdapter(Measurement)


def examine(place: NodePlace) -> None:
    """Returns when the head has all it needs of this node. RuntimeError if the head ends first."""
    store = SecretStore.join(place.host, place.port, RunSecret(key=place.secret), place.seconds)
    # Others try by its name whether it is reached: they connect, and say nothing.
    with closing(store), socket.create_server(("" if place.num_nodes > 1 else "127.0.0.1", 0)) as listener:
        try:
            facts = gather(place.name, place.expected, reached_at=_own_address(place))
        except MoerlError as error:
            store.set(f"facts/{place.index}", "!" + str(error))
            return
        store.set(f"facts/{place.index}", HELLO.dump_json(Hello(facts=facts, port=listener.getsockname()[1])).decode())
        _answer_clock(store, place.index)
        plan = PLAN.validate_json(store.get("plan"))
        store.set(f"reached/{place.index}", refusal_of(*plan.neighbours[place.index]) if place.index in plan.neighbours else "")
        with _ranks(place, plan, rank_variables(facts.settings, os.environ)) as processes:
            _wait_for_ranks(store, processes)
            # Until then others may still try this node's name.
            store.wait(["stop"], timedelta(seconds=place.seconds))
        store.set(f"done/{place.index}", "")


def _own_address(place: NodePlace) -> str | None:
    """By which the head, and so every node, sees this one; None where there is no other."""
    with socket.create_connection((place.host, place.port), timeout=_CONNECT_SECONDS) as connection:
        address = str(connection.getsockname()[0])
        return None if place.num_nodes == 1 or ipaddress.ip_address(address).is_loopback else address


def _answer_clock(store: SecretStore, index: int) -> None:
    for number in range(CLOCK_ROUNDS):
        store.wait([f"clock/{index}/{number}/asked"])
        store.set(f"clock/{index}/{number}", repr(time.time()))


def refusal_of(host: str, port: int) -> str:
    """Why it cannot be reached; empty if it can."""
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_SECONDS):
            return ""
    except OSError as error:
        return f"{host}: {error}"


def rank_variables(settings: tuple[Setting, ...], environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that the doctor's ranks get besides the environment."""
    given = {*environment, *read_nccl_files(environment)}
    return {name: value for name, value in _NET_CHANNELS.items() if name not in given} | variables(settings)


class LoggedProcess(subprocess.Popen[bytes]):
    """A module with its argument, which it reads from a pipe, ended with the block and with this process."""

    def __init__(self, module: str, argument: bytes, environment: Mapping[str, str]):
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed below
        super().__init__(
            [sys.executable, "-m", module], env=os.environ | environment, stdin=subprocess.PIPE, stdout=self._log, stderr=self._log,
            preexec_fn=end_with_parent,
        )  # fmt: skip
        assert self.stdin is not None, "a pipe"
        with suppress(BrokenPipeError), self.stdin as pipe:  # it has ended, and said why
            pipe.write(argument)

    def said(self) -> list[str]:
        self._log.seek(0)
        return self._log.read().decode(errors="replace").splitlines()

    def __exit__(self, *raised: Any) -> None:
        self.kill()
        self.wait()
        self._log.close()


@contextmanager
def _ranks(place: NodePlace, plan: Measurement, environment: Mapping[str, str]) -> Iterator[dict[int, LoggedProcess]]:
    """The node's ranks, ended in any case."""
    with ExitStack() as stack:
        ranks = {}
        for local, rank in enumerate(plan.ranks[place.index] if plan.ranks else ()):
            job = RankJob(
                host=place.host, port=place.port, secret=place.secret, rank=rank, nodes=plan.ranks, gpu=local if plan.on_gpus else None,
                num_bytes=plan.num_bytes, seconds=place.seconds,
            )  # fmt: skip
            ranks[rank] = stack.enter_context(LoggedProcess("moerl.doctor.measure_bandwidth", JOB.dump_json(job), environment))
        yield ranks


def _wait_for_ranks(store: SecretStore, ranks: Mapping[int, LoggedProcess]) -> None:
    """Until each has ended, or the head wants no more. What a rank that failed said last is left for the head."""
    while any(rank.poll() is None for rank in ranks.values()):
        if store.check(["stop"]):
            return
        time.sleep(_POLL_SECONDS)
    for number, rank in ranks.items():
        if rank.returncode != 0 and not store.check([f"failed/{number}"]):
            store.set(f"failed/{number}", "\n".join([f"it ended with code {rank.returncode}", *rank.said()[-5:]]))


if __name__ == "__main__":
    examine(PLACE.validate_json(sys.stdin.buffer.read()))
