"""Counts of routes over all ranks, and what they say about the load of experts and about replay."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from moerl.types.errors import TrainError
from moerl.types.stats import RoutingStats

GIVEN, FOLLOWED, AGREED = range(3)
"""Columns of the table: routes handed to routers, routes their layers followed, routes the routers would have chosen themselves."""
NUM_COUNTS = 3
"""Columns before those of the experts, which hold routes to each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingCounts:
    """Counts of tokens, padding left out."""

    layers: tuple[int, ...]
    """Layers with experts, by their number in the model."""
    top_k: int
    table: np.ndarray
    """float64 [layers, NUM_COUNTS + experts]"""

    def __add__(self, other: Self) -> "RoutingCounts":
        return replace(self, table=self.table + other.table)

    def check_followed(self) -> None:
        """TrainError unless every route that was given was followed."""
        given, followed = self.table[:, GIVEN], self.table[:, FOLLOWED]
        wrong = [f"layer {layer}: {f:.0f} of {g:.0f}" for layer, g, f in zip(self.layers, given, followed, strict=True) if f != g]
        if wrong:
            raise TrainError(
                f"train.router_replay: routes that were followed, of those given, in {len(wrong)} of {len(self.layers)} layers with "
                f"experts: {', '.join(wrong[:4])}: must be all. Something between routers and experts changes the routes (a setting under "
                "train.megatron?), or a layer ran with those of another micro-batch"
            )

    def stats(self) -> RoutingStats:
        routes = self.table[:, NUM_COUNTS:]
        total, num_experts = routes.sum(axis=1, keepdims=True), routes.shape[1]
        load = routes / np.maximum(total, 1) * num_experts - 1
        given = self.table[:, GIVEN]
        is_replayed = given.any()
        return RoutingStats(
            layers=self.layers,
            load_max=_floats(load.max(axis=1)),
            load_min=_floats(load.min(axis=1)),
            load_mean=_floats(np.abs(load).mean(axis=1)),
            dead_experts=tuple(int(count) for count in (routes == 0).sum(axis=1)),
            replayed=float(given.sum() * self.top_k / total.sum()) if is_replayed else None,
            overlap=_floats(self.table[:, AGREED] / np.maximum(given, 1)) if is_replayed else None,
        )


def _floats(values: np.ndarray) -> tuple[float, ...]:
    return tuple(values.tolist())
