"""Builds what every rank of a large run holds, in one process and without memory: torch's fake process group and meta tensors.

The code that runs is that of a training rank (initialize_groups, build_chunks, owned_by); only the group and the device are not real.
"""

import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from moerl.config.schema import TrainConfig
from moerl.models.family import Sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A tensor of one rank."""

    stage: int
    shard: int
    """The rank's number in the group that splits the tensor."""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    holders: dict[str, list[Held]]
    """Global Megatron name -> one for every rank that has it."""
    sizes: Sizes
    peak_bytes: int
    """Of the process, from its start."""


def survey(hf: Mapping[str, Any], train: TrainConfig, max_context: int) -> Survey:
    """Of all ranks of train.layout, one after the other. It replaces the process's default group."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from moerl.models.owned import owned_by
    from moerl.train.model import build_chunks, initialize_groups

    holders: dict[str, list[Held]] = {}
    dist.destroy_process_group()
    with _no_memory():
        for rank in range(train.layout.ranks):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=train.layout.ranks)
            initialize_groups(train.layout, 1)
            with torch.device("meta"):
                built = build_chunks(hf, train, max_context=max_context)
            stage = parallel_state.get_pipeline_model_parallel_rank()
            tensor, expert = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_expert_tensor_parallel_rank()
            for chunk in built.chunks:
                for item in owned_by(chunk, built.family, expert_rank=parallel_state.get_expert_model_parallel_rank()):
                    assert item.tensor.is_meta, f"{item.name} takes memory"
                    held = Held(stage=stage, shard=expert if item.rule.is_expert else tensor, shape=tuple(item.tensor.shape))
                    holders.setdefault(item.name, []).append(held)
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    return Survey(holders=holders, sizes=built.sizes, peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


@contextmanager
def _no_memory() -> Iterator[None]:
    """The current device is meta, and Megatron's groups of other backends are fake too."""
    import torch
    import torch.distributed as dist

    device, new_group = torch.cuda.current_device, dist.new_group

    def new_fake_group(*args: Any, backend: str | None = None, pg_options: Any = None, **kwargs: Any) -> Any:
        return new_group(*args, **kwargs)

    torch.cuda.current_device = lambda: torch.device("meta")  # type: ignore[assignment,return-value]
    dist.new_group = new_fake_group
    try:
        yield
    finally:
        torch.cuda.current_device, dist.new_group = device, new_group
