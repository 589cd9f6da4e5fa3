"""Plan of a run's pushes, which is made once: it takes seconds of the driver for the largest models, and a server that ends or starts again
changes nothing in it but who is there.
"""

from collections.abc import Iterator, Mapping
from itertools import accumulate

from moerl.types.push import Needs
from moerl.weights.plan.buckets import Deliveries, restricted
from moerl.weights.plan.run_plan import Nodes, Outline, RankPlaces, plan_deliveries
from moerl.weights.plan.transfer_plan import Rails


class KeptPlan:
    """Plan for the most servers that have been there so far, from which that for some of them follows."""

    def __init__(self) -> None:
        self.outline: Outline | None = None
        """Outline of the trainer, asked for once; None: ask."""
        self._trainer: object = None
        self._servers: dict[str, object] = {}
        """By name and in their order, what the plan follows from."""
        self._found: Deliveries | None = None
        self._needs: Mapping[str, Needs] = {}

    def of(
        self, needs: Mapping[str, Needs], nodes: Nodes | None = None, ranks: RankPlaces | None = None, rails: Rails | None = None
    ) -> Deliveries:
        """As plan_deliveries, of the outline."""
        assert self.outline is not None, "it is asked for before"
        outline = self.outline
        trainer = (outline, nodes is None, ranks and (ranks.nodes, ranks.gpus), rails and rails.senders)
        servers = dict(_of_servers(needs, nodes, ranks, rails))
        is_part = servers.items() <= self._servers.items() and [name for name in self._servers if name in servers] == list(servers)
        if self._found is None or not is_part or trainer != self._trainer:
            self._found = plan_deliveries(outline, needs, nodes, ranks, rails)
            self._trainer, self._servers, self._needs = trainer, servers, needs
        if len(servers) == len(self._servers):
            return self._found
        sizes = [len(processes) for processes in self._needs.values()]
        there = [
            number
            for name, first, size in zip(self._needs, accumulate(sizes, initial=0), sizes, strict=False)
            if name in servers
            for number in range(first, first + size)
        ]
        return restricted(self._found, {before: number for number, before in enumerate(there)})


def _of_servers(
    needs: Mapping[str, Needs], nodes: Nodes | None, ranks: RankPlaces | None, rails: Rails | None
) -> Iterator[tuple[str, object]]:
    first = 0
    for name, processes in needs.items():
        end = first + len(processes)
        cards = None if rails is None else rails.readers[first:end]
        yield name, (processes, nodes and tuple(nodes[name]), ranks and tuple(ranks.server_gpus[name]), cards)
        first = end
