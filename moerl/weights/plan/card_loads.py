"""Network cards in the plan of a push: whose turn it is to send and to receive, evenly, and on one rail where that costs little. Pure."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from moerl.config.schema.layout import Layout
from moerl.weights.plan.transfer_plan import Rails, RolloutLayout

T = TypeVar("T")


class Cards:
    """Bytes that the cards of ranks and of GPUs of the rollout have by now, and who is next."""

    def __init__(self, layout: Layout, rollout: RolloutLayout, rails: Rails | None, *, slack: int):
        """`slack`: bytes by which one may be ahead of the least for the sake of its rail."""
        self.sent, self.received = [0] * layout.ranks, [0] * rollout.num_gpus
        self._rails, self._slack = rails, slack

    def target(self, group: Sequence[int], having: Sequence[int]) -> int:
        """GPU of `group`: that with the least, of those on a rail of one that may send if they are not far ahead."""
        if self._rails is None:
            return min(group, key=self.received.__getitem__)
        rails = {self._rails.senders[rank] for rank in having}
        return self._least([gpu for gpu in group if self._rails.readers[gpu] in rails], group, self.received.__getitem__)

    def source(self, having: Sequence[int], target: int) -> int:
        """Rank of `having`: that with the least, of those on the target's rail if they are not far ahead."""
        if self._rails is None:
            return min(having, key=self.sent.__getitem__)
        rail = self._rails.readers[target]
        return self._least([rank for rank in having if self._rails.senders[rank] == rail], having, self.sent.__getitem__)

    def block(self, blocks: Sequence[Sequence[int]], node: Sequence[int]) -> Sequence[int]:
        """Group of ranks, of several that hold the same: that which has sent least, of those whose rails all are the node's."""
        if self._rails is None:
            return min(blocks, key=self._average)
        rails = {self._rails.readers[gpu] for gpu in node}
        return self._least(
            [ranks for ranks in blocks if rails.issuperset(self._rails.senders[rank] for rank in ranks)], blocks, self._average
        )

    def pair(self, ranks: Sequence[int], group: Sequence[int]) -> tuple[int, int]:
        """Rank of `ranks` and GPU of `group` for what any of these may send to any of those."""
        if self._rails is None:
            return min(ranks, key=self.sent.__getitem__), self.target(group, ranks)
        pairs = [(rank, self.target(group, [rank])) for rank in ranks]
        return min(pairs, key=lambda pair: self.sent[pair[0]] + self.received[pair[1]])

    def _average(self, ranks: Sequence[int]) -> float:
        return sum(self.sent[rank] for rank in ranks) / len(ranks)

    def _least(self, preferred: Sequence[T], others: Sequence[T], filled: Callable[[T], float]) -> T:
        least = min(others, key=filled)
        found = min(preferred, key=filled, default=least)
        return found if filled(found) <= filled(least) + self._slack else least
