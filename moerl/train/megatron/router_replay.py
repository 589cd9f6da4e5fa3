"""Which experts the decoder's routers choose: counted in updates; noted, or replayed, where train.router_replay says so.

Megatron asks whatever stands at TopKRouter.router_replay for a router's choice (megatron/core/transformer/moe/moe_utils.py,
topk_routing_with_score_function). Its own RouterReplay takes one target for the next call from a list of all routers of the process,
which says nothing of micro-batches, chunks, models or tokens without a route; here a router is asked with its micro-batch known:

* forward passes run inside `micro_batch`, where routes are those of that micro-batch;
* what is computed again for a backward pass runs outside. Schedules run the backward passes of a chunk in the order of its forward
  passes, so a router that ran without gradients in a pass that trains left its routes in a queue, and takes them from there.

Routers of multi-token prediction are no part of this: no engine records them, and they choose for themselves.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from moerl.config.schema.layout import Layout
from moerl.train.batching.packed_sequences import PackedMicroBatch
from moerl.train.batching.token_costs import mixture_layers
from moerl.train.megatron.routing_stats import AGREED, FOLLOWED, GIVEN, NUM_COUNTS, RoutingCounts
from moerl.types.batch import Batch
from moerl.types.errors import TrainError
from moerl.types.routes import RouteShape, is_unknown


@dataclass(slots=True, kw_only=True)
class _Running:
    """A micro-batch in its forward pass through one chunk."""

    is_token_T: Tensor  # bool, of this rank's positions
    routes: Tensor | None  # int64 [positions, layers of this rank, top_k], -1 where unknown
    trains: bool
    noted: dict[int, Tensor] | None
    """Layer of this rank -> [positions, top_k], where choices are noted."""


class Routing:
    """Routers of this rank, in all its chunks; `layers` count those with experts, over the whole model."""

    def __init__(self, config: TransformerConfig, chunks: Sequence[nn.Module], layout: Layout, *, replays: bool):
        self._layers = mixture_layers(config)
        self._shape = None
        if self._layers:
            self._shape = RouteShape(num_layers=len(self._layers), top_k=config.moe_router_topk, num_experts=config.num_moe_experts)
        self._tp = layout.tp
        self._rows, routers = _routers_of(chunks, self._layers)
        self._running: _Running | None = None
        self._again: list[deque[Tensor | None]] = [deque() for _ in routers]
        self._tables: dict[int, np.ndarray] = {}
        self._noted: dict[int, dict[int, Tensor]] | None = None
        self._counts: Tensor | None = None
        for place, router in enumerate(routers):
            router.register_forward_hook(partial(self._count, place))
            if replays:
                router.router_replay = _Chooser(self, place)

    def check(self, batch: Batch, mode: str) -> None:
        """TrainError unless `batch` has routes exactly if train.router_replay=`mode` wants them, and they are this model's."""
        shape = batch.routes_shape
        model = None if self._shape is None else (self._shape.num_layers, self._shape.top_k)
        if shape != (model if mode == "rollout" else None):
            wanted = f"(layers with experts, experts per token) = {model}" if mode == "rollout" else "none"
            raise TrainError(f"train.router_replay={mode}: an update of a batch with routes of {shape}: must be {wanted}")

    # -- around the passes of one schedule -------------------------------------------------------------------

    @contextmanager
    def run(self, packed: Sequence[PackedMicroBatch], *, trains: bool, notes: bool = False) -> Iterator[None]:
        """Inside, the micro-batches run: with their routes if they have some; `notes`: choices are kept for `noted`."""
        tables = {id(micro): self._table(micro) for micro in packed} if self._shape is not None else {}
        self._tables = {key: table for key, table in tables.items() if table is not None}
        self._noted = {id(micro): {} for micro in packed} if notes else None
        self._counts = self._new_counts(packed) if trains or self._tables else None
        for queue in self._again:
            queue.clear()  # of a run that failed
        yield
        self._tables = {}
        if any(self._again):
            raise TrainError("train.router_replay: layers that ran without gradients were not computed again, so routes went unused")

    @contextmanager
    def micro_batch(self, micro: PackedMicroBatch, *, trains: bool) -> Iterator[None]:
        """Inside, `micro` makes its forward pass through one chunk."""
        device = torch.cuda.current_device()
        table = self._tables.get(id(micro))
        self._running = _Running(
            is_token_T=torch.from_numpy(self._mine(micro.is_token_T)).to(device),
            routes=None if table is None else torch.from_numpy(_signed(table)).to(device).long(),
            trains=trains,
            noted=None if self._noted is None else self._noted[id(micro)],
        )
        try:
            yield
        finally:
            self._running = None

    def noted(self, packed: Sequence[PackedMicroBatch]) -> list[np.ndarray]:
        """Routes of the last run: uint8 or uint16 [positions of this rank, layers of this rank, top_k] for each micro-batch."""
        assert self._noted is not None and self._shape is not None, "the run kept no choices"
        dtype, places = self._shape.dtype, range(len(self._rows))
        chosen, self._noted = self._noted, None
        if not places:  # a stage of dense layers alone
            return [np.zeros((len(self._mine(micro.is_token_T)), 0, self._shape.top_k), dtype=dtype) for micro in packed]
        return [torch.stack([chosen[id(micro)][place] for place in places], dim=1).cpu().numpy().astype(dtype) for micro in packed]

    def counts(self) -> RoutingCounts | None:
        """Collective: of the last run, over all ranks; None for a dense model. TrainError if not every route given was followed."""
        if self._shape is None or self._counts is None:
            return None
        table, self._counts = self._counts, None
        groups = [
            parallel_state.get_data_parallel_group(with_context_parallel=True),
            parallel_state.get_pipeline_model_parallel_group(),
            parallel_state.get_tensor_model_parallel_group(),  # sequence parallel: every rank routes its part of the tokens
        ]
        for group in groups:
            dist.all_reduce(table, group=group)
        counts = RoutingCounts(layers=tuple(self._layers), top_k=self._shape.top_k, table=table.cpu().numpy())
        counts.check_followed()
        return counts

    # -- what routers ask and tell ---------------------------------------------------------------------------

    def routes_of(self, place: int) -> Tensor | None:
        """[positions, top_k] that the router at `place` shall follow in the pass it is in."""
        running = self._running
        if running is None:
            if not self._again[place]:
                raise TrainError("train.router_replay: a layer was computed again more often than it ran, so its route is not known")
            return self._again[place].popleft()
        routes = None if running.routes is None else running.routes[:, place]
        if running.trains and not torch.is_grad_enabled():
            self._again[place].append(routes)
        return routes

    def note(self, place: int, chosen: Tensor) -> None:
        if self._running is not None and self._running.noted is not None:
            self._running.noted[place] = chosen.to(torch.int16)

    @torch.no_grad()
    def _count(self, place: int, _: object, __: object, output: tuple[Tensor, Tensor]) -> None:
        """Hook, with the routing map in `output`: bool [positions, experts], which the layer will follow. A layer that is computed again
        counts once."""
        running, routing_map = self._running, output[1]
        if running is None or self._counts is None:
            return
        row, is_token_T = self._counts[self._rows[place]], running.is_token_T
        row[NUM_COUNTS:] += (routing_map & is_token_T[:, None]).sum(0)
        if running.routes is not None:
            routes = running.routes[:, place]
            is_followed_T = routing_map.gather(1, routes.clamp(min=0)).all(-1) & (routes[:, 0] >= 0)
            row[FOLLOWED] += (is_followed_T & is_token_T).sum()

    def compare(self, place: int, own: Tensor, routes: Tensor) -> None:
        """How often the router would have chosen the experts it was given; the order among them does not matter."""
        running = self._running
        if running is not None and self._counts is not None:
            agrees_T = (own.sort(-1).values == routes.sort(-1).values).all(-1)
            self._counts[self._rows[place], AGREED] += (agrees_T & running.is_token_T).sum()

    # -- this rank's part ------------------------------------------------------------------------------------

    def _mine(self, column_T: np.ndarray) -> np.ndarray:
        """Positions of a context-parallel rank: those of this tensor-parallel rank, which sequence parallelism gives it."""
        return np.split(column_T, self._tp)[parallel_state.get_tensor_model_parallel_rank()]

    def _table(self, micro: PackedMicroBatch) -> np.ndarray | None:
        """[positions, layers of this rank, top_k]"""
        if micro.kept_routes is not None:
            return micro.kept_routes
        return None if micro.routes_T is None else self._mine(micro.routes_T)[:, self._rows]

    def _new_counts(self, packed: Sequence[PackedMicroBatch]) -> Tensor | None:
        if self._shape is None:
            return None
        counts = np.zeros((self._shape.num_layers, NUM_COUNTS + self._shape.num_experts))
        for micro in packed:
            if (table := self._tables.get(id(micro))) is not None:
                is_given = ~is_unknown(table) & self._mine(micro.is_token_T)[:, None]
                counts[self._rows, GIVEN] += is_given.sum(axis=0)
        return torch.from_numpy(counts).to(torch.cuda.current_device())


class _Chooser:
    """Takes the place of Megatron's RouterReplay at one router."""

    def __init__(self, routing: Routing, place: int):
        self._routing, self._place = routing, place

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None = None, group_topk: int | None = None, default_compute_topk: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Experts [positions, top_k] and their `scores` [positions, experts], with gradient; the router's own where a route is unknown."""
        own_scores, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        routes = self._routing.routes_of(self._place)
        if routes is None:
            self._routing.note(self._place, own)
            return own_scores, own
        self._routing.compare(self._place, own, routes)
        chosen = torch.where(routes >= 0, routes, own)
        return scores.gather(1, chosen), chosen


def _routers_of(chunks: Sequence[nn.Module], layers: Sequence[int]) -> tuple[list[int], list[TopKRouter]]:
    """Rows in the whole model's table and routers of the decoder layers with experts, in order."""
    found = [
        (layers.index(layer.layer_number - 1), layer.mlp.router)
        for chunk in chunks
        for layer in chunk.decoder.layers  # type: ignore[union-attr]
        if isinstance(getattr(layer.mlp, "router", None), TopKRouter)
    ]
    return [row for row, _ in found], [router for _, router in found]


def _signed(routes: np.ndarray) -> np.ndarray:
    """int16, with -1 for unknown."""
    signed = routes.astype(np.int16)
    signed[is_unknown(routes)] = -1
    return signed


class KeptRoutes:
    """Routes a rank noted in a log-prob pass, until the update that replays them; by mini-batch, in order.

    The pass runs the very micro-batches of that update (the plan is a function of the batch), so every rank keeps what its own routers
    chose for its own positions: nothing is gathered, and nothing travels through the driver.
    """

    def __init__(self) -> None:
        self._mini_batches: list[list[tuple[np.ndarray, np.ndarray]]] = []

    def forget(self) -> None:
        self._mini_batches = []

    def keep(self, packed: Sequence[PackedMicroBatch], routes: Sequence[np.ndarray]) -> None:
        """Those of the micro-batches of the next mini-batch."""
        self._mini_batches.append([(micro.token_ids_T, table) for micro, table in zip(packed, routes, strict=True)])

    def drop(self) -> None:
        """Those of the next mini-batch, which the micro-batches have that were given them."""
        del self._mini_batches[:1]

    def given(self, packed: Sequence[PackedMicroBatch]) -> list[PackedMicroBatch]:
        """The micro-batches of the next mini-batch with their routes. TrainError if they are not those the pass ran."""
        kept = self._mini_batches[0] if self._mini_batches else []
        same = len(kept) == len(packed) and all(np.array_equal(t, m.token_ids_T) for (t, _), m in zip(kept, packed, strict=True))
        if not same:
            raise TrainError(
                f"train.router_replay=trainer: {len(kept)} micro-batches with routes for an update of {len(packed)}: must be the same "
                "ones. An update needs logprobs(batch, records_routes=True) of the same batch before it, once for each"
            )
        return [replace(micro, kept_routes=table) for micro, (_, table) in zip(packed, kept, strict=True)]
