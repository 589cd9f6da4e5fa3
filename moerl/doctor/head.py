"""The doctor's head: it meets the nodes in a store of its own, asks, measures, and judges what comes back."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch.distributed import DistStoreError

from moerl.doctor.checks.bandwidth_checks import Bandwidth, bandwidth_checks, combine
from moerl.doctor.checks.cluster_checks import Skew, clock_checks, count_checks, fabric_checks, likeness_checks, reach_checks
from moerl.doctor.checks.environment_checks import environment_checks
from moerl.doctor.checks.expected import Expectations
from moerl.doctor.checks.findings import Finding, fail, skipped, warn
from moerl.doctor.checks.gpu_checks import gpu_checks
from moerl.doctor.checks.host_checks import host_checks, rdma_checks
from moerl.doctor.checks.node_facts import NodeFacts
from moerl.doctor.measure_bandwidth import MEASURED
from moerl.doctor.on_each_node import CLOCK_ROUNDS, HELLO, PLAN, Hello, Measurement
from moerl.doctor.reach_nodes import Launched

GPU_BYTES, CPU_BYTES = 256 * 2**20, 4 * 2**20
_POLL_SECONDS = 0.05
_SETTLE_SECONDS = 5.0
"""After the first rank that failed, how long the others get to say what they failed with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    findings: tuple[Finding, ...]
    nodes: tuple[NodeFacts, ...]
    """Those that answered."""
    bandwidth: Bandwidth | None

    @property
    def is_healthy(self) -> bool:
        return not any(finding.verdict == "fail" for finding in self.findings)


def diagnose(launched: Launched, expected: Expectations, *, seconds: float, measures: bool) -> Diagnosis:
    """`seconds`: for each of: the nodes' first word, the measurements. `measures`: links are measured, not only looked at."""
    return _Head(launched, expected, seconds, measures).run()


class _Head:
    def __init__(self, launched: Launched, expected: Expectations, seconds: float, measures: bool):
        self._store, self._launched, self._expected, self._seconds, self._measures = launched.store, launched, expected, seconds, measures

    def run(self) -> Diagnosis:
        hellos, missing = self._meet()
        names = {index: self._launched.names[index] for index in hellos}
        came = [hellos[index].facts for index in hellos]
        skews = {names[index]: skew for index in hellos if (skew := self._skew(index)) is not None}
        plan = self._plan(hellos, complete=not missing)
        self._store.set("plan", PLAN.dump_json(plan).decode())
        self._wait_for(f"reached/{index}" for index in hellos)
        reached = self._reached(plan, names)
        bandwidth, failures = self._bandwidth(plan)
        self._store.set("stop", "")
        late = self._wait_for(f"done/{index}" for index in hellos)
        findings = [
            *count_checks(came, missing, self._expected),
            *likeness_checks(came),
            *fabric_checks(came),
            *clock_checks(skews),
            *reach_checks(came, reached),
            *(self._not_ended(int(key.split("/")[1])) for key in late),
        ]
        for facts in came:
            own = (
                *gpu_checks(facts, self._expected),
                *host_checks(facts),
                *rdma_checks(facts, self._expected),
                *environment_checks(facts, self._expected),
            )
            findings += [replace(finding, node=facts.name) for finding in own]
        findings += failures if bandwidth is None else bandwidth_checks(bandwidth, came, self._expected)
        return Diagnosis(findings=tuple(findings), nodes=tuple(came), bandwidth=bandwidth)

    def _not_ended(self, index: int) -> Finding:
        found = self._launched.dead().get(index, f"still at work {self._seconds:g} s after everything was measured")
        return warn("end of the doctor", found, "ends", "pgrep -af moerl.doctor", node=self._launched.names[index])

    def _meet(self) -> tuple[dict[int, Hello], dict[str, str]]:
        """Nodes by index as they came, and the names of the others with why they did not."""
        everyone = range(len(self._launched.names))
        self._wait_for(f"facts/{index}" for index in everyone)
        hellos, missing, dead = {}, {}, self._launched.dead()
        for index in everyone:
            name = self._launched.names[index]
            if not self._store.check([f"facts/{index}"]):
                missing[name] = dead.get(index, f"did not answer within {self._seconds:g} s{self._launched.hint}")
            elif (said := self._store.get(f"facts/{index}")).startswith(b"!"):
                missing[name] = said[1:].decode()
            else:
                hellos[index] = HELLO.validate_json(said)
        return hellos, missing

    def _wait_for(self, keys: Iterable[str]) -> list[str]:
        """Returns with the keys that are still missing when their nodes are dead or time is up."""
        missing, last = list(keys), time.monotonic() + self._seconds
        while missing := [key for key in missing if not self._store.check([key])]:
            dead = self._launched.dead()
            if time.monotonic() > last or all(int(key.split("/")[1]) in dead for key in missing):
                break
            time.sleep(_POLL_SECONDS)
        return missing

    def _skew(self, index: int) -> Skew | None:
        """Skew by the quickest of several questions: a clock's time lies between question and answer (Cristian's algorithm). None: no
        answer."""
        answers = []
        for number in range(CLOCK_ROUNDS):
            asked = time.time()
            self._store.set(f"clock/{index}/{number}/asked", "")
            try:
                theirs = float(self._store.get(f"clock/{index}/{number}"))
            except DistStoreError:
                return None
            trip = time.time() - asked
            answers.append(Skew(seconds=theirs - asked - trip / 2, error_seconds=trip / 2))
        return min(answers, key=lambda skew: skew.error_seconds)

    def _plan(self, hellos: Mapping[int, Hello], *, complete: bool) -> Measurement:
        indices = list(hellos)
        following = zip(indices, [*indices[1:], *indices[:1]], strict=True)
        neighbours = {i: (hellos[j].facts.hostname, hellos[j].port) for i, j in following if i != j}
        gpus = min((hello.facts.torch_gpus for hello in hellos.values()), default=0)
        # A single rank has nobody to talk to.
        per_node = gpus if gpus > 0 else (2 if len(indices) == 1 else 1)
        ranks = tuple(tuple(range(node * per_node, (node + 1) * per_node)) for node in range(len(indices)))
        return Measurement(
            neighbours=neighbours,
            ranks=ranks if self._measures and complete else (),
            on_gpus=gpus > 0,
            num_bytes=GPU_BYTES if gpus > 0 else CPU_BYTES,
        )

    def _reached(self, plan: Measurement, names: Mapping[int, str]) -> dict[str, tuple[str, str]]:
        """Node -> (the node that tried its name, why it failed or nothing)."""
        indices = list(names)
        found = {}
        for index in plan.neighbours:
            tried = indices[(indices.index(index) + 1) % len(indices)]
            is_there = self._store.check([f"reached/{index}"])
            found[names[tried]] = (names[index], self._store.get(f"reached/{index}").decode() if is_there else "no answer")
        return found

    def _bandwidth(self, plan: Measurement) -> tuple[Bandwidth | None, list[Finding]]:
        """Measurements of the ranks, or why there is nothing."""
        if not plan.ranks:
            why = "not asked for" if not self._measures else "not every node answered"
            return None, [skipped("bandwidth", why)]
        ranks = [rank for node in plan.ranks for rank in node]
        failures = self._wait_for_ranks(ranks)
        if failures:
            return None, [_failed(rank, why, plan, self._launched.names) for rank, why in failures.items()]
        measured = [[MEASURED.validate_json(self._store.get(f"measured/{rank}")) for rank in node] for node in plan.ranks]
        return combine(measured, on_gpus=plan.on_gpus), []

    def _wait_for_ranks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Ranks that did not measure, and why."""
        last, waiting = time.monotonic() + self._seconds, list(ranks)
        failed: dict[int, str] = {}
        while waiting and time.monotonic() < last:
            waiting = [rank for rank in waiting if not self._store.check([f"measured/{rank}"])]
            new = [rank for rank in waiting if self._store.check([f"failed/{rank}"])]
            if new and not failed:
                last = min(last, time.monotonic() + _SETTLE_SECONDS)
            failed |= {rank: self._store.get(f"failed/{rank}").decode() for rank in new}
            waiting = [rank for rank in waiting if rank not in failed]
            time.sleep(_POLL_SECONDS)
        return failed if failed else dict.fromkeys(waiting, f"no answer within {self._seconds:g} s")


def _failed(rank: int, why: str, plan: Measurement, names: Sequence[str]) -> Finding:
    node = next(index for index, ranks in enumerate(plan.ranks) if rank in ranks)
    lines = why.strip().splitlines()
    kind = "GPU" if plan.on_gpus else "rank"
    check = f"bandwidth, {kind} {plan.ranks[node].index(rank)}"
    return fail(check, lines[-1], "it measures", "NCCL_DEBUG=INFO moerl doctor", node=names[node])
