"""Uneven all-gather and reduce-scatter over gloo.

What breaks: with expert tensor parallelism the ranks of a group hold different numbers of routed tokens; NCCL gathers and
scatters unequal pieces, gloo refuses. Versions: 0.16.1 (read); target: megatron/core/tensor_parallel/mappings.py.
Can go: when gloo takes uneven sizes. Even sizes keep the upstream path.
"""

import torch
import torch.distributed as dist

from megatron_patches.errors import require_source

NAME = "uneven_gloo"
_KNOWN_GATHER = {"44633fe36d60a51f": "megatron-core 0.16.1"}
_KNOWN_SCATTER = {"7322068fab71d319": "megatron-core 0.16.1"}
_MARK = "_moerl_uneven_gloo"


def needed() -> bool:
    return not torch.cuda.is_available()


def active() -> bool:
    from megatron.core.tensor_parallel import mappings

    return bool(getattr(mappings._gather_along_first_dim, _MARK, False))


def apply() -> None:
    from megatron.core.tensor_parallel import mappings

    even_gather, even_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim
    require_source(even_gather, _KNOWN_GATHER, NAME)
    require_source(even_scatter, _KNOWN_SCATTER, NAME)

    def gather(input_, group, output_split_sizes=None, use_global_buffer=False):  # type: ignore[no-untyped-def]
        if output_split_sizes is None or group.size() == 1:
            return even_gather(input_, group, output_split_sizes, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        padded = input_.new_zeros((max(sizes), *input_.shape[1:]))
        padded[: input_.shape[0]] = input_
        pieces = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(pieces, padded, group=group)
        return torch.cat([piece[:size] for piece, size in zip(pieces, sizes, strict=True)])

    def scatter(input_, group, input_split_sizes=None, use_global_buffer=False):  # type: ignore[no-untyped-def]
        if input_split_sizes is None or group.size() == 1:
            return even_scatter(input_, group, input_split_sizes, use_global_buffer)
        summed = input_.contiguous().clone()
        dist.all_reduce(summed, group=group)
        return torch.split(summed, [int(size) for size in input_split_sizes])[group.rank()].contiguous()

    setattr(gather, _MARK, True)
    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather, scatter
