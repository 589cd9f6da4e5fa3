"""Collectives of one rank over gloo, in place, without their copies.

What breaks: nothing. Gradients that are reduced among one data-parallel rank, and parameters gathered from one, are where they must be;
NCCL sees that, gloo copies both, a twentieth of an update on a CPU. Versions: 0.16.1, 0.19.2 (read); target: the two functions that
megatron/core/distributed/param_and_grad_buffer.py binds when it is imported. Can go: when gloo sees it too. Groups of several ranks
keep the upstream path.
"""

from collections.abc import Callable
from typing import Any

import torch

NAME = "lone_rank"
_TARGETS = ("dist_all_gather_func", "dist_reduce_scatter_func")
_MARK = "_moerl_lone_rank"


def needed() -> bool:
    return not torch.cuda.is_available()


def active() -> bool:
    from megatron.core.distributed import param_and_grad_buffer

    return all(hasattr(getattr(param_and_grad_buffer, name), _MARK) for name in _TARGETS)


def apply() -> None:
    from megatron.core.distributed import param_and_grad_buffer

    for name in _TARGETS:
        setattr(param_and_grad_buffer, name, _unless_alone(getattr(param_and_grad_buffer, name)))


def _unless_alone(upstream: Callable[..., Any]) -> Callable[..., Any]:
    def collective(output: torch.Tensor, input_: torch.Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        """In a group of one both are the same memory: sums and averages of one rank are its values. Megatron waits for what the calls of a
        group were coalesced into, never for what one of them returns."""
        if group is not None and group.size() == 1 and output.data_ptr() == input_.data_ptr():
            return None
        return upstream(output, input_, *args, group=group, **kwargs)

    setattr(collective, _MARK, True)
    return collective
