"""Builds what ranks of a large run hold, without memory: torch's fake process group and meta tensors.

The code that runs is that of a training rank (initialize_groups, build_chunks); only the group and the device are not real.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from moerl.config.schema.layout import Layout
from moerl.config.schema.train_config import TrainConfig
from moerl.models.bridge.rank_parameters import RankParameter, hf_names, owned_by
from moerl.models.families.parts.config_fields import is_tied
from moerl.models.shards import cut_dim, merge
from moerl.train.megatron.megatron_model import Built, build_chunks
from moerl.train.megatron.process_groups import initialize_groups
from moerl.types.push import TensorSpec
from moerl.weights.plan.transfer_plan import PlannedTensor


@contextmanager
def as_rank(rank: int, layout: Layout) -> Iterator[None]:
    """Inside, this process is a rank of `layout` whose collectives do nothing, and the current device is meta."""
    with _no_memory():
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.ranks)
        try:
            initialize_groups(layout, 1)
            yield
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def build_on_meta(hf: Mapping[str, Any], train: TrainConfig, *, max_context: int, expert_rank: int) -> tuple[Built, list[RankParameter]]:
    """The chunks of the rank this process is, and what they hold."""
    with torch.device("meta"):
        built = build_chunks(hf, train, max_context=max_context)
    return built, [item for chunk in built.chunks for item in owned_by(chunk, built.family, expert_rank=expert_rank)]


def built_tensors(
    hf: Mapping[str, Any], train: TrainConfig, *, max_context: int, dtype: str, with_mtp: bool = False
) -> list[PlannedTensor]:
    """Every tensor of a push by the pipeline stage of train.layout that holds it: of the model that Megatron builds, for the planner's.

    `dtype`: of the rollout. `with_mtp`: and those of multi-token prediction. No default process group may exist.
    """
    ep = train.layout.ep
    layout = replace(train.layout, ranks=train.layout.pp * ep, tp=1, cp=1, etp=1)
    train = replace(train, layout=layout, mtp_loss=train.mtp_loss if with_mtp else 0.0)
    found: dict[str, PlannedTensor] = {}
    for stage in range(layout.pp):
        with as_rank(stage * ep, layout):
            built, owned = build_on_meta(hf, train, max_context=max_context, expert_rank=0)
        for item, numbers in _on_all_expert_ranks(owned, ep):
            names = hf_names(item.rule, numbers, num_layers=built.sizes.num_layers, tied=is_tied(hf))
            for name, tensor in zip(names, merge(item.rule, [item.tensor], sizes=built.sizes), strict=True):
                planned = PlannedTensor(
                    spec=TensorSpec(name=name, shape=tuple(tensor.shape), dtype="float32" if item.rule.is_float32 else dtype),
                    stage=stage,
                    expert=numbers.get("expert"),
                    cut_dim=cut_dim(item.rule),
                )
                found.setdefault(name, planned)  # a tied embedding is on the first and on the last stage
    return list(found.values())


def _on_all_expert_ranks(owned: Iterable[RankParameter], ep: int) -> Iterator[tuple[RankParameter, dict[str, int]]]:
    """Parameters of the first expert rank, and in their places those of the others, which differ in the numbers of their experts alone:
    to build each takes most of the time of a large model."""
    groups: dict[Any, list[RankParameter]] = {}
    for item in owned:
        others = {**item.numbers, "expert": 0}
        key = (item.rule.megatron, *others.items()) if "expert" in item.numbers else item.name
        groups.setdefault(key, []).append(item)
    for members in groups.values():
        for rank in range(ep if "expert" in members[0].numbers else 1):
            for item in members:
                shifted = {"expert": item.numbers["expert"] + rank * len(members)} if rank else {}
                yield item, item.numbers | shifted


@contextmanager
def _no_memory() -> Iterator[None]:
    device, new_group = torch.cuda.current_device, dist.new_group

    def new_fake_group(ranks: Any = None, *args: Any, backend: str | None = None, pg_options: Any = None, **kwargs: Any) -> Any:
        # Every rank tells torch of every group. Those of others, hundreds to a group of its own, would take most of the time.
        if ranks is not None and dist.get_rank() not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        return new_group(ranks, *args, **kwargs)

    torch.cuda.current_device = lambda: torch.device("meta")  # type: ignore[assignment,return-value]
    dist.new_group = new_fake_group
    try:
        yield
    finally:
        torch.cuda.current_device, dist.new_group = device, new_group
