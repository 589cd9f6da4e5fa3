"""Checks of the measured bandwidths: nodes, pairs and GPUs that are slow beside the others, and all of them beside what links can carry."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_high

from moerl.doctor.checks.expected import Expectations
from moerl.doctor.checks.findings import ALL_NODES, Finding, bad, ok, skipped
from moerl.doctor.checks.node_facts import NodeFacts
from moerl.doctor.checks.slow_nodes import Measured, Pair, judge, outliers, speed_of
from moerl.hardware.hardware_tools import Absent
from moerl.hardware.network_settings import fabric_ports

_GOOD_SHARE, _LEAST_SHARE = 0.7, 0.5
"""Shares of the expected bandwidth: below the first a warning, below the second a failure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bandwidth:
    """In 1e9 bytes per second, one way."""

    between_nodes: Mapping[Pair, float]
    """Bandwidth of all ranks of a node together, with those of the other."""
    inside: Sequence[Mapping[Pair, float]]
    """Node by node, between its ranks."""
    node_all_reduce: Sequence[float]
    """Node by node; empty for a single node, and for nodes of a single rank."""
    all_reduce: float | None
    on_gpus: bool


def combine(measured: Sequence[Sequence[Measured]], *, on_gpus: bool) -> Bandwidth:
    """Measurements of all ranks: node by node, rank by rank of the node. Of the two ends of a link the slower one counts."""
    between: dict[Pair, float] = {}
    for a, ranks in enumerate(measured):
        for b in range(a + 1, len(measured)):
            both = zip(ranks, measured[b], strict=True)
            between[a, b] = sum(min(near.remote[b], far.remote[a]) for near, far in both)
    inside = [
        {(i, j): min(one.local[j], ranks[j].local[i]) for i, one in enumerate(ranks) for j in one.local if i < j} for ranks in measured
    ]
    own = [min(found) for ranks in measured if (found := [r.node_all_reduce for r in ranks if r.node_all_reduce is not None])]
    together = [r.all_reduce for ranks in measured for r in ranks if r.all_reduce is not None]
    return Bandwidth(
        between_nodes=between, inside=inside, node_all_reduce=own, all_reduce=min(together, default=None), on_gpus=on_gpus
    )  # fmt: skip


def bandwidth_checks(found: Bandwidth, came: Sequence[NodeFacts], expected: Expectations) -> Iterator[Finding]:
    names = [facts.name for facts in came]
    yield from _beside_others("nodes", names, found.between_nodes, found.on_gpus)
    what = "GPUs" if found.on_gpus else "ranks"
    for facts, links in zip(came, found.inside, strict=True):
        ranks = [f"{what[:-1]} {index}" for index in range(1 + max((b for _, b in links), default=0))]
        yield from (replace(finding, node=facts.name) for finding in _beside_others(what, ranks, links, found.on_gpus))
    yield from _all_reduce_inside(names, found)
    node_gb = expected.gb_per_second if expected.gb_per_second is not None else _infiniband(came)
    gpu_gb = _nvlink(came) if expected.gb_per_second is None or len(came) > 1 else expected.gb_per_second
    between, local = list(found.between_nodes.values()), [speed for links in found.inside for speed in links.values()]
    demands = found.on_gpus and expected.gb_per_second is not None
    yield from _beside_links("between nodes", between, node_gb, "InfiniBand", found.on_gpus, fails=demands)
    yield from _beside_links("inside nodes", local, gpu_gb, "NVLink", found.on_gpus, fails=demands and len(came) == 1)
    if found.all_reduce is not None:
        limits = (node_gb, "InfiniBand") if len(came) > 1 else (gpu_gb, "NVLink")
        yield from _beside_links("all-reduce", [found.all_reduce], *limits, found.on_gpus, fails=False)


def _beside_others(what: str, names: Sequence[str], links: Mapping[Pair, float], on_gpus: bool) -> Iterator[Finding]:
    """Slow ones by name. Nothing is said of fewer than three, which have no others to be compared with."""
    if len(names) < 3:
        return
    judged = judge(len(names), links, share=_GOOD_SHARE)
    wanted, least = f"{_GOOD_SHARE:.0%} of {judged.reference:.3g} GB/s, which most {what} reach", _LEAST_SHARE * judged.reference
    for one in judged.slow:
        speed = speed_of(one, links)
        fix = f"# take it out and look at its links: sbatch --exclude={names[one]}" if what == "nodes" else "nvidia-smi topo -m"
        found, node = f"{names[one]}: {speed:.3g} GB/s", names[one] if what == "nodes" else ALL_NODES
        yield bad(f"slow beside other {what}", found, wanted, fix, fails=on_gpus and speed < least, node=node)
    for a, b in judged.slow_pairs:
        found, fix = f"{names[a]} - {names[b]}: {links[a, b]:.3g} GB/s", "ibdiagnet  # the path between them"
        yield bad(f"slow pair of {what}", found, wanted, fix, fails=on_gpus and links[a, b] < least)
    if not judged.slow and not judged.slow_pairs:
        yield ok(f"{what} beside each other", f"{min(links.values()):.3g} to {max(links.values()):.3g} GB/s", wanted)


def _all_reduce_inside(names: Sequence[str], found: Bandwidth) -> Iterator[Finding]:
    speeds = found.node_all_reduce
    for index in outliers(speeds, share=_GOOD_SHARE):
        usual = median_high(speeds)
        wanted, fix = f"{_GOOD_SHARE:.0%} of {usual:.3g} GB/s, which most nodes reach", "nvidia-smi topo -m; nvidia-smi nvlink --status"
        fails = found.on_gpus and speeds[index] < _LEAST_SHARE * usual
        yield bad("all-reduce inside", f"{speeds[index]:.3g} GB/s", wanted, fix, fails=fails, node=names[index])


def _beside_links(check: str, values: Sequence[float], limit: float | None, links: str, on_gpus: bool, *, fails: bool) -> Iterator[Finding]:
    """`fails`: the limit is what the user demands. How much NCCL reaches of what links carry has not been tried on all kinds of them."""
    if not values:
        return
    # The upper one: those that are slow beside the others have been named, and one in two may be.
    usual = median_high(values)
    found = f"{usual:.3g} GB/s" + ("" if on_gpus else " (gloo, CPU)")
    if limit is None:
        yield skipped(f"bandwidth {check}", f"{found}; no {links} link to expect a figure from, and no --gb-per-second")
        return
    share, wanted = usual / limit, f"{_GOOD_SHARE:.0%} of {limit:.3g} GB/s"
    if share >= _GOOD_SHARE:
        yield ok(f"bandwidth {check}", found, wanted)
    else:
        fix = "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET moerl doctor  # are NET/IB and GDRDMA in its lines?"
        yield bad(f"bandwidth {check}", found, wanted, fix, fails=fails and share < _LEAST_SHARE)


def _infiniband(came: Sequence[NodeFacts]) -> float | None:
    """GB/s of the weakest node's ports together; None if a node has none, or does not know their rates."""
    rates = [[port.gbit for port in fabric_ports(facts.ports, facts.topology)] for facts in came]
    if any(not node or None in node for node in rates):
        return None
    return min(sum(gbit for gbit in node if gbit is not None) for node in rates) / 8


def _nvlink(came: Sequence[NodeFacts]) -> float | None:
    """GB/s of one GPU's links together; None where not all GPUs of a node are linked to each other."""
    sums = []
    for facts in came:
        if isinstance(facts.links, Absent) or isinstance(facts.topology, Absent) or not facts.topology.has_nvlink:
            return None
        sums += [sum(rate for rate in gpu.gb_per_second if rate is not None) for gpu in facts.links]
    return min(sums, default=None)
