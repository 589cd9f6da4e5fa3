"""Checks of the nodes together: how many, whether they are alike, their InfiniBand, their clocks, and
whether they find each other by name."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_high

from moerl.doctor.checks.expected import Expectations
from moerl.doctor.checks.findings import Finding, bad, fail, ok, skipped, warn
from moerl.doctor.checks.host_checks import is_loopback
from moerl.doctor.checks.node_facts import NodeFacts
from moerl.hardware.hardware_tools import Absent, present

_SKEW_SECONDS, _MAX_SKEW_SECONDS = 0.1, 5.0
"""Clocks: logs are merged by time, and the modification times that rendezvous and checkpoints over shared folders compare."""
_OF_ONE_NODE = ("NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
"""Settings that may differ between nodes; with others different, ranks would disagree on how to talk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Skew:
    seconds: float
    """Seconds of the node's clock, ahead of the head's."""
    error_seconds: float
    """Half the round trip in which it was measured."""


def count_checks(came: Sequence[NodeFacts], missing: Mapping[str, str], expected: Expectations) -> Iterator[Finding]:
    """`missing`: name -> why."""
    for name, why in missing.items():
        fix = f"srun --nodelist={name} --time=1 hostname; sinfo -R  # or leave it out: sbatch --exclude={name}"
        yield fail("node", why, "answers", fix, node=name)
    found = f"{len(came)} of {len(came) + len(missing)}" if missing else str(len(came))
    if expected.nodes is not None and len(came) < expected.nodes:
        yield fail("nodes", found, str(expected.nodes), f"# sbatch --nodes={expected.nodes}")
    else:
        yield ok("nodes", found, "" if expected.nodes is None else str(expected.nodes))
    total = sum(len(present(facts.gpus)) for facts in came)
    if expected.ranks is not None and (total > 0 or expected.gpus_per_node):
        own = f" and {expected.server_gpus} GPUs of servers" if expected.server_gpus else ""
        needed = f"{expected.ranks} train ranks{own}"
        if total < expected.ranks + expected.server_gpus:
            yield fail("GPUs of all nodes", str(total), needed, "# more nodes, or a smaller train.layout")
        else:
            yield ok("GPUs of all nodes", str(total), needed)


def likeness_checks(came: Sequence[NodeFacts]) -> Iterator[Finding]:
    """A node that differs from most is named, property by property."""
    if len(came) < 2:
        return
    properties: dict[str, list[str]] = {
        "GPUs": [_gpus(facts) for facts in came],
        "driver": [gpus[0].driver if (gpus := present(facts.gpus)) else "none" for facts in came],
        "network settings": [_settings(facts) for facts in came],
    }
    for name in came[0].versions:
        found = [facts.versions.get(name, Absent(reason="not installed")) for facts in came]
        properties[name] = [version.reason if isinstance(version, Absent) else version for version in found]
    differing = False
    for name, values in properties.items():
        usual = Counter(values).most_common(1)[0][0]
        where = came[values.index(usual)].name
        for facts, value in zip(came, values, strict=True):
            if value != usual:
                differing = True
                fix = f"# make it as on the other nodes, or leave it out: sbatch --exclude={facts.name}"
                yield fail(f"same {name}", value, f"{usual}, as on {where}", fix, node=facts.name)
    if not differing:
        yield ok("nodes are alike", "GPUs, driver, versions, network settings")


def clock_checks(skews: Mapping[str, Skew]) -> Iterator[Finding]:
    """Node -> its clock against the head's."""
    expected = f"within {_SKEW_SECONDS:g} s of the head"
    for name, skew in skews.items():
        found = f"{skew.seconds:+.3f} s (+- {skew.error_seconds:.3f})"
        off = abs(skew.seconds) - skew.error_seconds
        fix = "chronyc tracking; sudo chronyc makestep"
        if off > _SKEW_SECONDS:
            yield bad("clock", found, expected, fix, fails=off > _MAX_SKEW_SECONDS, node=name)
        else:
            yield ok("clock", found, expected, node=name)


def reach_checks(came: Sequence[NodeFacts], reached: Mapping[str, tuple[str, str]]) -> Iterator[Finding]:
    """`reached`: node -> (which other tried its host name, why that failed or nothing). Where gloo is told an interface, names matter less:
    only to what reads the log, and to libraries that were told nothing."""
    for facts in came:
        if facts.name not in reached:
            yield skipped("reached by name", "there is no other node", node=facts.name)
            continue
        by, refusal = reached[facts.name]
        expected = "an address that other nodes reach"
        other = next(one for one in came if one.name == by)
        said = f"not from {by}: {refusal}" if refusal else ""
        if not refusal and is_loopback(facts) and other.boot_id != facts.boot_id:
            said = (
                f"{facts.hostname} is {', '.join(present(facts.own_addresses))} on the node itself: ranks there would wait for others at it"
            )
        fix = f"# on every node, in /etc/hosts or DNS: ADDRESS {facts.hostname}; not 127.0.1.1"
        if not said:
            yield ok("reached by name", f"from {by}", expected, node=facts.name)
        elif facts.gloo_interface:
            yield warn("reached by name", f"{said}; gloo uses {facts.gloo_interface}", expected, fix, node=facts.name)
        else:
            yield fail("reached by name", said, expected, f"{fix}; or network.interface=", node=facts.name)


def _gpus(facts: NodeFacts) -> str:
    gpus = present(facts.gpus)
    return f"{len(gpus)} of {', '.join(sorted({gpu.name for gpu in gpus}))}" if gpus else "0"


def _settings(facts: NodeFacts) -> str:
    shared = {s.name: s.value for s in facts.settings if s.value is not None and s.name not in _OF_ONE_NODE}
    return " ".join(f"{name}={value}" for name, value in sorted(shared.items())) if shared else "none"


_CHECK = "InfiniBand beside other nodes"
_UNKNOWN = float("inf")
"""Rate of a port that is there; 0 stands for one that is not."""


def fabric_checks(came: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Fastest with fastest, and so on: adapters may have other names on other nodes. Nodes whose ports could not be asked for have failed
    already and are left out."""
    nodes = [(facts, _active(facts)) for facts in came if not (isinstance(facts.ports, Absent) and facts.ports.is_fault)]
    most = max((len(ports) for _, ports in nodes), default=0)
    if len(nodes) < 2 or most == 0:
        return
    if any(rate == _UNKNOWN for _, ports in nodes for rate in ports.values()):
        nodes = [(facts, dict.fromkeys(ports, _UNKNOWN)) for facts, ports in nodes]
    rates = [sorted(ports.values(), reverse=True) + [0.0] * (most - len(ports)) for _, ports in nodes]
    usual = [median_high(column) for column in zip(*rates, strict=True)]
    expected = f"{_counted(usual)}, as most nodes have"
    worse = [index for index, own in enumerate(rates) if any(mine < theirs for mine, theirs in zip(own, usual, strict=True))]
    for index in worse:
        facts, ports = nodes[index]
        names = _worse_ports(ports, [others for _, others in nodes])
        found = _counted(rates[index]) + (f"; missing or slower: {', '.join(names)}" if names else "")
        fix = f"ibstat; lspci | grep -i mellanox  # adapter, cable, switch port; or leave it out: sbatch --exclude={facts.name}"
        yield fail(_CHECK, found, expected, fix, node=facts.name)
    if not worse:
        yield ok(_CHECK, _counted(usual), "no node with fewer or slower ports")


def _active(facts: NodeFacts) -> dict[str, float]:
    """Port -> its rate."""
    active = (port for port in present(facts.ports) if port.is_active and port.link_layer == "InfiniBand")
    return {port.name: _UNKNOWN if port.gbit is None else port.gbit for port in active}


def _worse_ports(own: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> list[str]:
    """By their names on most nodes."""
    names = dict.fromkeys(name for ports in nodes for name in ports)
    return [name for name in names if own.get(name, 0.0) < median_high(ports.get(name, 0.0) for ports in nodes)]


def _counted(rates: Sequence[float]) -> str:
    counts = Counter(rate for rate in rates if rate > 0)
    said = [f"{num} active" + ("" if rate == _UNKNOWN else f" at {rate:g} Gb/s") for rate, num in counts.items()]
    return ", ".join(said) if said else "no active port"
