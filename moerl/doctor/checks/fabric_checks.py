"""InfiniBand of the nodes together: a node with fewer active ports than most, or slower ones, is named with the ports."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median_high

from moerl.doctor.checks.findings import Finding, fail, ok
from moerl.doctor.checks.node_facts import NodeFacts
from moerl.hardware.hardware_tools import Absent

_CHECK = "InfiniBand beside other nodes"


def fabric_checks(came: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Fastest with fastest, and so on: adapters may have other names on other nodes. Nodes whose ports could not be asked for have failed
    already and are left out."""
    nodes = [(facts, _active(facts)) for facts in came if not (isinstance(facts.ports, Absent) and facts.ports.is_fault)]
    most = max((len(ports) for _, ports in nodes), default=0)
    if len(nodes) < 2 or most == 0:
        return
    if any(gbit is None for _, ports in nodes for gbit in ports.values()):
        nodes = [(facts, dict.fromkeys(ports)) for facts, ports in nodes]
    rates = [_ranked(ports, most) for _, ports in nodes]
    usual = [median_high(column) for column in zip(*rates, strict=True)]
    expected = f"{_text(usual)}, as most nodes have"
    worse = [index for index, own in enumerate(rates) if any(mine < theirs for mine, theirs in zip(own, usual, strict=True))]
    for index in worse:
        facts, ports = nodes[index]
        names = _worse_ports(ports, [others for _, others in nodes])
        found = _text(rates[index]) + (f"; missing or slower: {', '.join(names)}" if names else "")
        fix = f"ibstat; lspci | grep -i mellanox  # adapter, cable, switch port; or leave it out: sbatch --exclude={facts.name}"
        yield replace(fail(_CHECK, found, expected, fix), node=facts.name)
    if not worse:
        yield ok(_CHECK, _text(usual), "no node with fewer or slower ports")


def _active(facts: NodeFacts) -> dict[str, float | None]:
    """Port -> its rate."""
    ports = () if isinstance(facts.ports, Absent) else facts.ports
    return {port.name: port.gbit for port in ports if port.is_active and port.link_layer == "InfiniBand"}


def _rate(gbit: float | None) -> float:
    """An unknown one stands for a port that is there, a rate of 0 for one that is not."""
    return float("inf") if gbit is None else gbit


def _ranked(ports: dict[str, float | None], num: int) -> list[float]:
    """Fastest first."""
    return sorted(map(_rate, ports.values()), reverse=True) + [0.0] * (num - len(ports))


def _worse_ports(own: dict[str, float | None], nodes: Sequence[dict[str, float | None]]) -> list[str]:
    """By their names on most nodes."""
    names = dict.fromkeys(name for ports in nodes for name in ports)
    usual = {name: median_high(_rate(ports[name]) if name in ports else 0.0 for ports in nodes) for name in names}
    return [name for name in names if (_rate(own[name]) if name in own else 0.0) < usual[name]]


def _text(rates: Sequence[float]) -> str:
    counts = Counter(rate for rate in rates if rate > 0)
    said = [f"{num} active" + ("" if rate == float("inf") else f" at {rate:g} Gb/s") for rate, num in counts.items()]
    return ", ".join(said) if said else "no active port"
