"""Memory of a GPU that no layout cuts: CUDA's own, NCCL's buffers, what engines need beside weights and caches. Measured by others.

None of it follows from a formula; a run's own figures are set beside it by `moerl plan --compare`.
"""

from collections.abc import Iterator

from moerl.config.schema.layout import Layout
from moerl.config.schema.rollout_config import RolloutConfig

GIB = 2**30
MIB = 2**20

CUDA_CONTEXT = 600 * MIB
"""Bytes of a process on a Hopper GPU, with cuBLAS's workspaces."""
COMMUNICATOR = {False: 544 * MIB, True: 688 * MIB}
"""Bytes of a communicator that has run a collective; True: of more than two ranks (github.com/NVIDIA/nccl/issues/964, NVLink)."""
ALL_TO_ALL_PEER = 480 * MIB
"""Bytes of each peer on the same node: 3.28 GB of eight H100 (github.com/NVIDIA/nccl/issues/1685)."""
ALL_TO_ALL_NETWORK = 512 * MIB
"""Buffer that peers over the network share (github.com/NVIDIA/nccl/issues/2363)."""
ENGINE_ASLEEP = CUDA_CONTEXT + 1 * GIB + 1434 * MIB
"""Context, NCCL's buffers (github.com/vllm-project/vllm/pull/51485) and CUDA graphs (issues/47654) of a server that sleeps."""
ENGINE_ASLEEP_REPORTED = 7 * GIB
"""All that such a server was seen to keep, tensor parallel over 8 GPUs (github.com/vllm-project/vllm/issues/47654)."""
SGLANG_RUNTIME = 10 * GIB
"""Bytes that SGLang leaves for activations, graphs and workspaces on GPUs of over 60 GiB (srt/arg_groups/memory_hook.py, 0.5.23)."""
VLLM_FRACTION = 0.92
"""vLLM's own rollout.layout.memory_fraction (config/cache.py, 0.32); it counts what it needs beside weights and caches."""
RECEIVED = 512 * MIB
"""Bytes of tensors that come in pieces, on each GPU of a server of vLLM in a push (moerl/weights/installation.py, DEVICE_BYTES)."""
PUSH_BUFFERS = 2
"""Buffers of weights.bucket_bytes each, on every rank that sends (moerl/weights/send.py); given back after each push."""
RELAY_BUFFERS = 2
"""As many more on a rank that relays to servers of its node (moerl/weights/transport/relay_transport.py)."""
HOST_PROCESS = 3 * GIB
"""Host memory of a process with PyTorch, CUDA's libraries and Transformer Engine or an engine. An assumption."""
COLLECTOR_PROCESS = 160 * MIB
"""Host memory of a collector beside the samples, which are in Ray's object store (benchmarks/footprint.py)."""


def communicator_bytes(layout: Layout, gpus_per_node: int, *, has_shared_embedding: bool, has_muon: bool = False) -> int:
    """Bytes of all groups that Megatron runs collectives in (megatron/core/parallel_state.py), and of connections for all-to-all: of the
    experts' dispatcher, and of Muon over data parallelism, of dense weights and of experts."""
    groups = sum(COMMUNICATOR[size > 2] for size in _groups(layout, has_shared_embedding=has_shared_embedding) if size > 1)
    exchanged = [(layout.ep, layout.etp)]
    if has_muon:
        exchanged += [(layout.dp * layout.cp, layout.tp), (layout.edp, layout.etp * layout.ep)]
    return groups + sum(_all_to_all(size, apart, gpus_per_node) for size, apart in exchanged)


def default_group_bytes(layout: Layout) -> int:
    """Bytes that are left when train.destroy_groups has ended Megatron's groups."""
    return COMMUNICATOR[layout.ranks > 2] if layout.ranks > 1 else 0


def _groups(layout: Layout, *, has_shared_embedding: bool) -> Iterator[int]:
    """Ranks of each: all, tensor, context, data with and without context, pipeline, model, embedding, and those of the experts."""
    yield from (layout.ranks, layout.tp, layout.cp, layout.dp, layout.dp * layout.cp, layout.pp, layout.tp * layout.pp)
    if has_shared_embedding and layout.pp > 1:
        yield 2
    if layout.ep > 1 or layout.etp != layout.tp:
        yield from (layout.etp, layout.edp, layout.etp * layout.ep * layout.pp)


def _all_to_all(size: int, apart: int, gpus_per_node: int) -> int:
    """Bytes of a group of `size` ranks that are `apart` from each other."""
    if size == 1:
        return 0
    inside = min(size, max(1, gpus_per_node // apart))
    return (inside - 1) * ALL_TO_ALL_PEER + (ALL_TO_ALL_NETWORK if inside < size else 0)


def static_fraction(rollout: RolloutConfig, memory: int) -> float:
    """Share of a GPU that a server takes for weights and caches; vLLM: for everything."""
    if rollout.layout.memory_fraction is not None:
        return rollout.layout.memory_fraction
    return VLLM_FRACTION if rollout.engine == "vllm" else 1 - SGLANG_RUNTIME / memory
