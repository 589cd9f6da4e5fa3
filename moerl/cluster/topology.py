"""The order of nodes in which neighbours are near: that of Slurm's topology.conf (topology/tree or topology/block), or of their names.

SwitchName=leaf0 Nodes=gpu[01-04,07]
SwitchName=spine Switches=leaf[0-1]
BlockName=rack0 Nodes=gpu[01-18]
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from moerl.types.errors import ConfigError, Problem

_FIELD = re.compile(r'([\w.]+)\s*=\s*(?:"([^"]*)"|(\S+))')
_PART = re.compile(r"[^,\[\]]+(?:\[[^\]]*\][^,\[\]]*)*|\[[^\]]*\][^,\[\]]*")


def by_name(names: Iterable[str]) -> list[str]:
    """node2 before node10."""
    return sorted(
        names, key=lambda name: [(not part.isdigit(), int(part) if part.isdigit() else part) for part in re.split(r"(\d+)", name)]
    )


def by_topology(names: Iterable[str], text: str, *, path: str) -> list[str]:
    """As the switches of `text` have them, the tree walked from its root; blocks in their order. A name with a domain that `text` does not
    have is looked for without it. ConfigError if one is missing."""
    nodes, switches = _read(text)
    below = set(chain.from_iterable(switches.values()))
    roots = [name for name in chain(switches, nodes) if name not in below]
    order = {name: number for number, name in enumerate(chain.from_iterable(_leaves(root, nodes, switches) for root in roots))}
    places = {name: order.get(name, order.get(name.partition(".")[0])) for name in names}
    if missing := [name for name in by_name(places) if places[name] is None]:
        reason = f"the place of {', '.join(missing)} in the network is not known"
        fix = "a file that has every node of the run, or leave it out: then the order of their names counts"
        raise ConfigError([Problem(path="placement.topology", value=path, rule="must name every node", reason=reason, fix=fix)])
    known = {name: place for name, place in places.items() if place is not None}
    return sorted(known, key=known.__getitem__)


def expand(hosts: str) -> list[str]:
    """gpu[01-03,7],login -> gpu01, gpu02, gpu03, gpu7, login."""
    return [name for part in _PART.findall(hosts) for name in _expand_one(part)]


def _expand_one(part: str) -> list[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    inside, _, tail = rest.partition("]")
    return [f"{head}{number}{end}" for number in chain.from_iterable(map(_range, inside.split(","))) for end in _expand_one(tail)]


def _range(text: str) -> list[str]:
    first, dash, last = text.partition("-")
    return [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)] if dash else [first]


def _read(text: str) -> tuple[Mapping[str, Sequence[str]], Mapping[str, Sequence[str]]]:
    """(nodes, switches) right below each switch; a block is a switch of nodes."""
    nodes: dict[str, Sequence[str]] = {}
    switches: dict[str, Sequence[str]] = {}
    for line in _lines(text):
        settings = {name.lower(): quoted or plain for name, quoted, plain in _FIELD.findall(line)}
        if "blockname" in settings and "nodes" in settings:
            nodes[settings["blockname"]] = expand(settings["nodes"])
        elif "switchname" in settings and "nodes" in settings:
            nodes[settings["switchname"]] = expand(settings["nodes"])
        elif "switchname" in settings and "switches" in settings:
            switches[settings["switchname"]] = expand(settings["switches"])
    return nodes, switches


def _lines(text: str) -> list[str]:
    """Lines as Slurm has them (src/common/parse_config.c): without comments, one that ends in a backslash together with the next."""
    return re.sub(r"[^\S\n]*(#.*)?$", "", f"{text}\n", flags=re.MULTILINE).replace("\\\n", "").splitlines()


def _leaves(switch: str, nodes: Mapping[str, Sequence[str]], switches: Mapping[str, Sequence[str]]) -> Iterator[str]:
    yield from nodes.get(switch, ())
    for below in switches.get(switch, ()):
        yield from _leaves(below, nodes, switches)
