"""Plan of a run's pushes, which is made once: it takes seconds of the driver for the largest models, and a server that ends or starts again
changes nothing in it but who is there.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from moerl.types.push import Needs
from moerl.weights.plan.buckets import Deliveries, restricted
from moerl.weights.plan.run_plan import Nodes, Outline, RankPlaces, plan_deliveries
from moerl.weights.plan.transfer_plan import Rails


class _Server(NamedTuple):
    """Part of a server in what the plan follows from."""

    needs: Needs
    nodes: tuple[str, ...] | None
    gpus: tuple[int, ...] | None
    rails: tuple[int, ...] | None


class KeptPlan:
    """Plan for the most servers that have been there so far, from which that for some of them follows."""

    def __init__(self) -> None:
        self.outline: Outline | None = None
        """Outline of the trainer, asked for once; None: ask."""
        self._trainer: object = None
        self._servers: dict[str, _Server] = {}
        """By name, in their order."""
        self._found: Deliveries | None = None

    def of(
        self, needs: Mapping[str, Needs], nodes: Nodes | None = None, ranks: RankPlaces | None = None, rails: Rails | None = None
    ) -> Deliveries:
        """As plan_deliveries, of the outline."""
        assert self.outline is not None, "it is asked for before"
        trainer = (self.outline, nodes is None, ranks and (ranks.nodes, ranks.gpus), rails and rails.senders)
        servers = dict(_of_servers(needs, nodes, ranks, rails))
        is_part = servers.items() <= self._servers.items() and [name for name in self._servers if name in servers] == list(servers)
        if self._found is None or not is_part or trainer != self._trainer:
            self._found = plan_deliveries(self.outline, needs, nodes, ranks, rails)
            self._trainer, self._servers = trainer, servers
        if len(servers) == len(self._servers):
            return self._found
        owners = [name for name, server in self._servers.items() for _ in server.needs]
        there = [number for number, name in enumerate(owners) if name in servers]
        return restricted(self._found, {before: number for number, before in enumerate(there)})


def _of_servers(
    needs: Mapping[str, Needs], nodes: Nodes | None, ranks: RankPlaces | None, rails: Rails | None
) -> Iterator[tuple[str, _Server]]:
    first = 0
    for name, processes in needs.items():
        end = first + len(processes)
        yield (
            name,
            _Server(
                needs=processes,
                nodes=None if nodes is None else tuple(nodes[name]),
                gpus=None if ranks is None else tuple(ranks.server_gpus[name]),
                rails=None if rails is None else rails.readers[first:end],
            ),
        )
        first = end
