"""A training rank's record of what it does: the call, the micro-batch, the collective, for a report about a rank that hangs.

On GPUs a collective is over when it is launched: its line says which was launched last, and the counts of a group's ranks who is behind.
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any, TypeVar

from moerl.hangs.progress import BESIDE, COLLECTIVE, FIRST_GROUP, MAX_TEXT, MICRO_BATCH, NUM_LINES, WAIT, WORK, ProgressRecord

T = TypeVar("T")

COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "_all_gather_base", "reduce_scatter", "reduce_scatter_tensor",
    "_reduce_scatter_base", "all_to_all", "all_to_all_single", "broadcast", "reduce", "gather", "scatter", "barrier",
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
)  # fmt: skip
POINT_TO_POINT = ("send", "recv", "isend", "irecv", "batch_isend_irecv")
"""Noted, not counted: two ranks of a group alone take part."""

_record: ProgressRecord | None = None
"""Record of this process. None in a process that is no rank of a run."""
_is_watching = False


def keep_record(*, beside: str) -> Callable[[type[T]], type[T]]:
    """Class decorator: the public methods of a rank are noted while they run; those of Ray's concurrency group `beside` on a line of
    their own."""

    def decorate(worker: type[T]) -> type[T]:
        for name, method in list(vars(worker).items()):
            if inspect.isfunction(method) and not name.startswith("_"):
                line = BESIDE if getattr(method, "__ray_concurrency_group__", None) == beside else WORK
                setattr(worker, name, _noted(method, line))
        return worker

    return decorate


def open_record() -> None:
    """From here on this process is a rank."""
    global _record
    if _record is None:
        watch_collectives()
        _record = ProgressRecord()


def watch_collectives() -> None:
    """Note them once there is a record. Before Megatron is imported: it takes some functions of torch.distributed by their names."""
    global _is_watching
    if _is_watching:
        return
    _is_watching = True
    import torch.distributed as dist  # not in the driver, which decorates the class of its ranks

    from megatron_patches import shared_exchange

    if not shared_exchange.active():
        shared_exchange.apply()  # beneath the record; whether it is needed is not asked, since that would start CUDA
    groups = _Groups(dist)
    for name in COLLECTIVES:
        setattr(dist, name, _noted(getattr(dist, name), COLLECTIVE, groups))
    for name in POINT_TO_POINT:
        noted = _noted(getattr(dist, name), COLLECTIVE)
        setattr(dist, name, noted)
        # P2POp takes isend and irecv alone, and tells them apart by identity, with the names of the module that defines them.
        setattr(dist.distributed_c10d, name, noted)
    dist.Work.wait = _noted(dist.Work.wait, WAIT)  # type: ignore[method-assign]


def counted(micro_batches: Sequence[T]) -> Iterator[T]:
    """The same, and each is noted when it is taken."""
    for number, micro_batch in enumerate(micro_batches, start=1):
        if _record is not None:
            _record.write(MICRO_BATCH, number, len(micro_batches), b"")
        yield micro_batch


class _Groups:
    """A line of the record for every group of ranks that this rank communicates in."""

    def __init__(self, distributed: ModuleType) -> None:
        self._distributed = distributed
        self._line_of_text: dict[bytes, int] = {}
        self._known: weakref.WeakKeyDictionary[Any, tuple[int, bytes]] = weakref.WeakKeyDictionary()
        self.num_entered = [0] * NUM_LINES

    def line(self, group: Any) -> tuple[int, bytes]:
        """Its line and text. Groups of the same ranks and purpose, such as those made again after a sleep, have one."""
        group = self._distributed.group.WORLD if group is None else group
        found = self._known.get(group)
        if found is None:
            text = f"{_ranks(self._distributed.get_process_group_ranks(group))} {group.group_desc}".encode()[:MAX_TEXT]
            free = min(FIRST_GROUP + len(self._line_of_text), NUM_LINES - 1)  # groups beyond the last line share it
            found = self._known[group] = (self._line_of_text.setdefault(text, free), text)
        return found


def _noted(function: Callable[..., Any], line: int, groups: _Groups | None = None) -> Callable[..., Any]:
    """The same, on `line` of the record while it runs. `groups`: it is a collective, and counts for the group that it is called with."""
    text = function.__name__.encode()
    place = None if groups is None else list(inspect.signature(function).parameters).index("group")

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        own = 0
        if _record is not None:
            if groups is not None and place is not None:
                own, group_text = groups.line(args[place] if len(args) > place else kwargs.get("group"))
                groups.num_entered[own] += 1
                _record.write(own, groups.num_entered[own], 0, group_text)
            _record.write(line, 1, own, text)
        try:
            return function(*args, **kwargs)
        finally:
            if _record is not None:  # which `function` may have opened
                _record.write(line, 0, own, text)

    return call


def _ranks(ranks: Sequence[int]) -> str:
    """As first-last/step where they are evenly spaced: [0-6/2] for 0, 2, 4, 6."""
    steps = {second - first for first, second in pairwise(ranks)}
    if len(ranks) < 3 or len(steps) > 1:
        return str(list(ranks))
    (step,) = steps
    return f"[{ranks[0]}-{ranks[-1]}{'' if step == 1 else f'/{step}'}]"
