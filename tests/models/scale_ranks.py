"""Builds what every rank of a large run holds, without memory (tests/suite/on_meta.py)."""

import pickle
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from moerl.config.schema.train_config import TrainConfig
from moerl.models.shards import Sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Of a rank, as Megatron's process groups tell it."""

    stage: int
    tensor: int
    expert: int
    expert_tensor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    places: dict[int, Place]
    """By rank."""
    held: dict[Place, dict[str, tuple[int, ...]]]
    """Shapes of what a rank there holds, by global Megatron name. Ranks of one place hold the same, so it is built once."""
    sizes: Sizes
    peak_bytes: int
    """Of the larger process, from its start."""


def survey(hf: Mapping[str, Any], train: TrainConfig, max_context: int, directory: Path) -> None:
    """Ranks of train.layout, one after the other: of P processes the p-th takes every P-th stage. Writes to `directory`.

    It replaces the process's default group.
    """
    import torch.distributed as dist
    from on_meta import as_rank, build_on_meta
    from torch.testing._internal.distributed.fake_pg import FakeStore

    part, num_parts = dist.get_rank(), dist.get_world_size()
    places: dict[int, Place] = {}
    held: dict[Place, dict[str, tuple[int, ...]]] = {}
    num_ranks, per_stage = train.layout.ranks, train.layout.ranks // train.layout.pp
    _list_groups_once()
    dist.barrier()  # the other process may still be connecting, and would lose this one
    dist.destroy_process_group()
    for rank in (rank for rank in range(num_ranks) if rank // per_stage % num_parts == part):
        with as_rank(rank, train.layout):
            place = places[rank] = _place()
            if place not in held:
                built, owned = build_on_meta(hf, train, max_context=max_context, expert_rank=place.expert)
                held[place] = {item.name: tuple(item.tensor.shape) for item in owned}
                assert len(held[place]) == len(owned), "a rank holds a tensor twice"
                assert all(item.tensor.is_meta for item in owned), "a tensor takes memory"
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (directory / f"part-{part}").write_bytes(pickle.dumps(Survey(places=places, held=held, sizes=built.sizes, peak_bytes=peak_bytes)))


def numbers_to_push(hf: Mapping[str, Any], train: TrainConfig) -> int:
    """Of all tensors of a push. It replaces the process's default group."""
    import torch.distributed as dist
    from on_meta import built_tensors
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    found = built_tensors(hf, train, max_context=32, dtype="bfloat16")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    return sum(prod(tensor.spec.shape) for tensor in found)


def _list_groups_once() -> None:
    """Megatron lists the ranks of all groups from the sizes alone; for every rank anew, that takes as long as the models."""
    from megatron.core import parallel_state

    given = parallel_state.generate_masked_orthogonal_rank_groups
    listed = cache(lambda num_ranks, sizes, mask: given(num_ranks, list(sizes), list(mask)))
    parallel_state.generate_masked_orthogonal_rank_groups = lambda num_ranks, sizes, mask: [
        ranks.copy() for ranks in listed(num_ranks, tuple(sizes), tuple(mask))
    ]


def read_survey(directory: Path) -> Survey:
    """What all processes of `survey` wrote."""
    parts: list[Survey] = [pickle.loads(file.read_bytes()) for file in sorted(directory.glob("part-*"))]
    return Survey(
        places={rank: place for part in parts for rank, place in part.places.items()},
        held={place: shapes for part in parts for place, shapes in part.held.items()},
        sizes=parts[0].sizes,
        peak_bytes=max(part.peak_bytes for part in parts),
    )


def _place() -> Place:
    from megatron.core import parallel_state

    return Place(
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        tensor=parallel_state.get_tensor_model_parallel_rank(),
        expert=parallel_state.get_expert_model_parallel_rank(),
        expert_tensor=parallel_state.get_expert_tensor_parallel_rank(),
    )
