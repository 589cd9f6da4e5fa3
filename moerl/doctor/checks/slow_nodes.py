"""Which nodes (or GPUs of a node) are slow, by the bandwidth of every pair of them. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_high

Pair = tuple[int, int]
"""Lower number first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    reference: float
    """Speed that a link between two healthy ones carries, in the unit of the links; 0 without links."""
    slow: tuple[int, ...]
    """Most of whose links are slow."""
    slow_pairs: tuple[Pair, ...]
    """Slow links between two that are not slow themselves."""


def rounds(num: int) -> list[list[Pair]]:
    """Every pair once, in rounds in which each takes part at most once (circle method): num - 1 rounds, or num if it is odd."""
    circle: list[int | None] = [*range(num), *([None] if num % 2 else [])]
    played = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        met = zip(circle[:half], reversed(circle[half:]), strict=True)
        played.append([(min(a, b), max(a, b)) for a, b in met if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return played


def judge(num: int, links: Mapping[Pair, float], *, share: float) -> Judgement:
    """Slow is a link under `share` of the reference: the upper median over nodes of the best link each one has.

    At least half of them, and two, must be healthy, and no assumption is made of how slow the others are. With two nodes there is one link
    and nothing to compare it with.
    """
    if not links:
        return Judgement(reference=0.0, slow=(), slow_pairs=())
    best = [max((speed for pair, speed in links.items() if node in pair), default=0.0) for node in range(num)]
    reference = median_high(best)
    below = {pair for pair, speed in links.items() if speed < share * reference}
    suspects, slow = set(range(num)), []
    while (worst := _worst(suspects, below, links)) is not None:
        suspects.remove(worst)
        slow.append(worst)
    pairs = sorted(pair for pair in below if suspects.issuperset(pair))
    return Judgement(reference=reference, slow=tuple(sorted(slow)), slow_pairs=tuple(pairs))


def speed_of(node: int, links: Mapping[Pair, float]) -> float:
    """The median over its links; 0 without one."""
    own = [speed for pair, speed in links.items() if node in pair]
    return median(own) if own else 0.0


def outliers(values: Sequence[float], *, share: float) -> tuple[int, ...]:
    """Which of the same measurement's values on several nodes are below `share` of their upper median."""
    return tuple(index for index, value in enumerate(values) if value < share * median_high(values))


def _worst(suspects: set[int], below: set[Pair], links: Mapping[Pair, float]) -> int | None:
    """The one with the largest share of slow links to other suspects, if it is more than half of at least two."""
    shares = {}
    for node in suspects:
        others = [pair for pair in links if node in pair and suspects.issuperset(pair)]
        if len(others) >= 2:
            shares[node] = sum(pair in below for pair in others) / len(others)
    worst = max(sorted(shares), key=lambda node: (shares[node], -speed_of(node, links)), default=None)
    return worst if worst is not None and shares[worst] > 0.5 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """By one rank, in 1e9 bytes per second."""

    local: dict[int, float]
    """Other rank of the node -> what it sent and received at the same time, one way."""
    remote: dict[int, float]
    """Other node -> the same with its rank of the same local number."""
    node_all_reduce: float | None
    """Bus bandwidth (nccl-tests, PERFORMANCE.md) of the node's ranks; None for a single rank, and on a single node."""
    all_reduce: float | None
    """Bandwidth of all ranks; None for a single one."""
