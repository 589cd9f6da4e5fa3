"""Routes a rank noted in a log-prob pass, until the update that replays them.

The pass runs the very micro-batches of that update (the plan is a function of the batch), so every rank keeps what its own routers chose
for its own positions: nothing is gathered, and nothing travels through the driver.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from moerl.train.batching.packing import PackedMicroBatch
from moerl.types.errors import TrainError


class KeptRoutes:
    """Routes of the mini-batches of one update, in order."""

    def __init__(self) -> None:
        self._mini_batches: list[list[tuple[np.ndarray, np.ndarray]]] = []

    def forget(self) -> None:
        self._mini_batches = []

    def keep(self, packed: Sequence[PackedMicroBatch], routes: Sequence[np.ndarray]) -> None:
        """Those of the micro-batches of the next mini-batch."""
        self._mini_batches.append([(micro.token_ids_T, table) for micro, table in zip(packed, routes, strict=True)])

    def take(self, packed: Sequence[PackedMicroBatch]) -> list[PackedMicroBatch]:
        """The micro-batches of the next mini-batch with their routes. TrainError if they are not those the pass ran."""
        kept = self._mini_batches.pop(0) if self._mini_batches else []
        same = len(kept) == len(packed) and all(np.array_equal(t, m.token_ids_T) for (t, _), m in zip(kept, packed, strict=True))
        if not same:
            raise TrainError(
                f"train.router_replay=trainer: {len(kept)} micro-batches with routes for an update of {len(packed)}: must be the same "
                "ones. An update needs logprobs(batch, records_routes=True) of the same batch before it, once for each"
            )
        return [replace(micro, kept_routes=table) for micro, (_, table) in zip(packed, kept, strict=True)]
