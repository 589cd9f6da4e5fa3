"""Megatron's process groups, which can be ended and made again while everybody who holds one keeps holding it.

Megatron's modules, buffers and optimizers keep their groups for life (parallel_state, ProcessGroupCollection, tp_group, ...). So
each of them gets a `ReloadableGroup`, which hands every call to a real group behind it. Ending the real one frees its
communicators, with NCCL their GPU buffers; making it again is a collective over the default group, which stays.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.distributed import distributed_c10d

from moerl.config.derive.rdma import SHARP
from moerl.config.schema.layout import Layout
from moerl.types.errors import ResidencyError

NewGroup = Callable[..., Any]


class ReloadableGroup(dist.ProcessGroup):
    """Stands for one real group at a time; without one every communication raises ResidencyError."""

    def __init__(self, real: dist.ProcessGroup):
        super().__init__(real.rank(), real.size())  # type: ignore[call-arg]  # the stub lacks it
        self.real: dist.ProcessGroup | None = real
        self._ranks = dist.get_process_group_ranks(real)
        self._enter_in_torch(real)

    def _enter_in_torch(self, real: dist.ProcessGroup) -> None:
        """torch.distributed looks up ranks, backend and store of a group in tables of its own; the name must be another."""
        world: Any = distributed_c10d._world
        for table in (world.pg_map, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag):
            table[self] = table[real]
        world.pg_names[self] = f"reloadable-{world.pg_names[real]}"

    def behind(self) -> dist.ProcessGroup:
        if self.real is None:
            raise ResidencyError(f"communication in the group of ranks {self._ranks} while the trainer sleeps: its groups are ended")
        return self.real


def _method(name: str) -> Callable[..., Any]:
    def call(self: ReloadableGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.behind(), name)(*args, **kwargs)

    return call


def _property(name: str) -> property:
    return property(lambda self: getattr(self.behind(), name))


# Rank and size are answered without a real group: Megatron reads them at any time.
_OWN = ("rank", "size", "BackendType")
for _name, _member in ((name, getattr(dist.ProcessGroup, name)) for name in dir(dist.ProcessGroup) if not name.startswith("__")):
    if isinstance(_member, property):
        setattr(ReloadableGroup, _name, _property(_name))
    elif callable(_member) and _name not in _OWN:
        setattr(ReloadableGroup, _name, _method(_name))


class ReloadableGroups:
    """Every group made inside `recording`, in order, those of other ranks too: all ranks make all groups again in the same order."""

    def __init__(self) -> None:
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any], ReloadableGroup | None]] = []
        self._new_group: NewGroup = dist.new_group
        self.are_ended = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Groups made by dist.new_group inside are reloadable."""
        dist.new_group = self._record
        try:
            yield
        finally:
            dist.new_group = self._new_group
        _batch_on_the_real_group()

    def _record(self, *args: Any, **kwargs: Any) -> Any:
        real = self._new_group(*args, **kwargs)
        is_member = isinstance(real, dist.ProcessGroup)
        group = ReloadableGroup(real) if is_member else None
        self._calls.append((args, kwargs, group))
        return group if is_member else real

    def end(self) -> None:
        """Collective. Communicators and what they hold are gone when it returns."""
        _wait_for_all()
        for _, _, group in reversed(self._calls):
            if group is not None:
                real, group.real = group.behind(), None
                dist.destroy_process_group(real)
        self.are_ended = True

    def make_again(self) -> None:
        """Collective. NCCL connects at the first communication of each group."""
        for args, kwargs, group in self._calls:
            real = self._new_group(*args, **kwargs)
            if group is not None:
                group.real = real
        self.are_ended = False


def initialize_groups(layout: Layout, seed: int, *, timeout_seconds: float = 1800, reloadable: bool = False) -> ReloadableGroups | None:
    """Megatron's process groups over the default group, and its RNG streams. `timeout_seconds`: of their collectives, rounded up to
    minutes. `reloadable`: the groups can be ended and made again."""
    groups = ReloadableGroups() if reloadable else None
    with groups.recording() if groups is not None else nullcontext():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            distributed_timeout_minutes=math.ceil(timeout_seconds / 60),
            create_gloo_process_groups=False,  # for checkpoints in a form of Megatron's that moerl has not
            use_sharp=_sums_in_switches(),
        )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return groups


def _sums_in_switches() -> bool:
    """Whether all ranks ask for SHARP. Megatron does not heed the variable: it asks for its data-parallel groups alone, as a switch has few
    flows, and waits there for all ranks, so that they must agree."""
    if not torch.cuda.is_available():
        return False
    asks = torch.tensor(int(os.environ.get(SHARP) == "1"))
    dist.all_reduce(asks, dist.ReduceOp.MIN)
    return bool(asks)


def _wait_for_all() -> None:
    """Nobody may end a group in which another still communicates. A tensor on the CPU, so that the default group needs no NCCL."""
    torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1))


def _batch_on_the_real_group() -> None:
    """batch_isend_irecv batches only for `type(group) is ProcessGroup`. Unbatched, two NCCL ranks that send to each other would hang."""
    upstream = dist.batch_isend_irecv
    if getattr(upstream, "_unwraps_reloadable", False):
        return

    def batch_isend_irecv(p2p_op_list: Sequence[dist.P2POp]) -> list[Any]:
        for op in p2p_op_list:
            if isinstance(op.group, ReloadableGroup):
                op.group = op.group.behind()
        return upstream(list(p2p_op_list))

    batch_isend_irecv._unwraps_reloadable = True  # type: ignore[attr-defined]
    dist.batch_isend_irecv = batch_isend_irecv
