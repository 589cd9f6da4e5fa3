"""Save the optimizer state of parameters from where it lies when the padding between buckets is taken out.

What breaks: the `fully_reshardable` checkpoint joins the buckets of a buffer without their padding, then cuts out each parameter at
its place in the buffer *with* padding. From the second bucket on, unless every bucket ends on a multiple of 128 and of the
data-parallel size, parameters get the states of their neighbours, with no more than a warning ("param range exceeds unpadded
buffer"). Several buckets: overlap_grad_reduce, or an embedding shared by pipeline stages. Versions: 0.16.1 and 0.19.2 (read);
upstream: distrib_optimizer.py, sharded_param_state_fully_reshardable. Can go: when upstream subtracts the padding.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_patches.errors import require_source

NAME = "bucket_padding"
_KNOWN = {
    "sharded_param_state_fully_reshardable": {"e888c7cccb71525a": "megatron-core 0.16.1", "6df6392a0ebb4c79": "megatron-core 0.19.2"},
    "get_parameter_state_dp_zero": {"812c52ea4568b0ff": "megatron-core 0.16.1", "14d11a75ad9ccd8b": "megatron-core 0.19.2"},
}
_MARK = "_moerl_bucket_padding"


def needed() -> bool:
    return True


def active() -> bool:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    return bool(getattr(DistributedOptimizer.sharded_param_state_fully_reshardable, _MARK, False))


def apply() -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    for name, known in _KNOWN.items():
        require_source(getattr(DistributedOptimizer, name), known, NAME)
    upstream = DistributedOptimizer.sharded_param_state_fully_reshardable

    def sharded_param_state_fully_reshardable(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        with _places_without_padding(self.buffers):
            return upstream(self, *args, **kwargs)

    setattr(sharded_param_state_fully_reshardable, _MARK, True)
    DistributedOptimizer.sharded_param_state_fully_reshardable = sharded_param_state_fully_reshardable


@contextmanager
def _places_without_padding(buffers: list[Any]) -> Iterator[None]:
    maps = [buffer.param_index_map for buffer in buffers]
    for buffer in buffers:
        buffer.param_index_map = _without_padding(buffer)
    try:
        yield
    finally:
        for buffer, places in zip(buffers, maps, strict=True):
            buffer.param_index_map = places


def _without_padding(buffer: Any) -> dict[Any, tuple[int, int, int]]:
    """Each parameter moved forward by the padding at the ends of the buckets before its own."""
    padding, total = [], 0
    for bucket in buffer.buckets:
        padding.append(total)
        total += bucket.grad_data.numel() - bucket.numel_unpadded
    return {param: (start - padding[b], end - padding[b], b) for param, (start, end, b) in buffer.param_index_map.items()}
