"""Contents of a checkpoint on a training rank, as Megatron's sharded tensors: every one a view, nothing gathered or copied.

    decoder.layers.7.mlp.experts...            weights and buffers, under global layer numbers, whatever the pipeline split
    optimizer.state.exp_avg.<weight>           of every weight, in the weight's own shape; exp_avg_sq likewise, but not of Muon's
    optimizer.state.param.<weight>             float32 master weights of a bfloat16 run; in full precision the weights are the masters
    rng/shard_<rank>_<ranks>                   random streams of each rank
    common.pt                                  optimizer steps taken, layout and dtype

Megatron's own formats of the distributed optimizer either gather its state over data parallel to save it (fully_reshardable) or are
tied to the layout (dp_reshardable). Here each rank's range of a parameter becomes boxes of that parameter (boxes.py), which a
checkpoint can store and cut differently when it is read. The names are those of fully_reshardable.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor, nn

from moerl.train.checkpoint.boxes import boxes_of_range
from moerl.train.optimizer.matrices import owned_ranges
from moerl.train.optimizer.muon import MuonStep

logger = logging.getLogger(__name__)

_STATE, _MASTER = "optimizer.state", "optimizer.state.param"


def model_state(chunks: Iterable[nn.Module]) -> dict[str, Any]:
    """State of every chunk. The chunks' keys differ because layers are numbered globally."""
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "non_homogeneous_layers": True,  # a key per layer: no layout decides how layers are stacked
    }
    return {f"chunk{index}": chunk.sharded_state_dict(metadata=metadata) for index, chunk in enumerate(chunks)}  # type: ignore[operator]


def parts_of(model: dict[str, Any]) -> list[ShardedTensor | ShardedObject]:
    """All of it, each tensor a view of the model's own, so that what is read into them needs no merging."""
    parts: list[ShardedTensor | ShardedObject] = []
    for entry in nested_values(model):
        if not isinstance(entry, ShardedTensorFactory):
            parts.append(entry)
            continue
        built = list(nested_values(entry.build()))
        own = entry.data.untyped_storage().data_ptr()
        assert all(part.data.untyped_storage().data_ptr() == own for part in built), f"{entry.key}: Megatron copies its parts"
        parts += built
    return parts


def with_objects(chunk: dict[str, Any], objects: dict[str, Any]) -> dict[str, Any]:
    """State of a chunk as a module takes it: its own tensors, which were read in place, and the objects by their keys."""
    return {name: objects[entry.unique_key] if isinstance(entry, ShardedObject) else entry.data for name, entry in chunk.items()}


def read_from_masters(model: dict[str, Any], parameters: set[Tensor]) -> None:
    """In place: `parameters`, those that are trained, come from the float32 masters that the checkpoint of a bfloat16 run holds; all else
    from where it is."""

    def renamed(entry: Any) -> Any:
        is_weight = isinstance(entry, ShardedTensor | ShardedTensorFactory) and entry.data in parameters
        return replace(entry, key=f"{_MASTER}.{entry.key}") if is_weight else entry

    dict_list_map_inplace(renamed, model)


def drop_extra_state(model: dict[str, Any]) -> None:
    """In place: leave out what Transformer Engine keeps beside weights (histories of FP8), which begins anew."""
    for chunk in model.values():
        for name in [name for name in chunk if "._extra_state" in name]:
            del chunk[name]


# -- optimizer -------------------------------------------------------------------------------------------------


def num_optimizer_steps(optimizer: Any) -> int:
    """Updates applied so far; 0 on a rank that updates no parameter."""
    steps = {
        group["step"] for each in _distributed(optimizer) for group in each.state_dict()["optimizer"]["param_groups"] if "step" in group
    }
    assert len(steps) <= 1, f"one count of optimizer steps, not {sorted(steps)}"
    return int(steps.pop()) if steps else 0


def has_stepped(optimizer: Any) -> bool:
    """Whether there are tensors to save."""
    return all(each.optimizer.state for each in _distributed(optimizer))


@torch.no_grad()
def begin_optimizer_state(optimizer: Any) -> None:
    """State of an optimizer that has taken no step, as its first step would make it."""
    allocate_optimizer_state(optimizer, 0)
    for each in _distributed(optimizer):
        for state in each.optimizer.state.values():
            for name in state.keys() & {"exp_avg", "exp_avg_sq"}:
                state[name].zero_()


def allocate_optimizer_state(optimizer: Any, num_steps: int) -> None:
    """Make the tensors that `optimizer_state` then fills, and set the count of steps."""
    for each in _distributed(optimizer):
        state = each.state_dict()
        for group in state["optimizer"]["param_groups"]:
            group["step"] = num_steps
        each.load_state_dict(state)
        if isinstance(each.optimizer.step, MuonStep):  # Megatron gives every parameter Adam's states
            each.optimizer.step.drop_second_moments()


@dataclass(frozen=True, slots=True)
class OptimizerShards:
    shards: dict[str, ShardedTensor]
    """This rank's ranges of moments and, in mixed precision, master weights."""
    owned: list[tuple[Any, Tensor, dict[str, Tensor]]]
    """(optimizer, weight, the tensors that the shards are views of)."""

    @torch.no_grad()
    def install(self) -> None:
        """After loading: give the tensors back to optimizers that keep theirs in another form; the others own them already."""
        for optimizer, weight, tensors in self.owned:
            optimizer._set_main_param_and_optimizer_states(weight, tensors)
        for inner in {id(optimizer): optimizer.optimizer for optimizer, _, _ in self.owned}.values():
            if isinstance(inner, HybridDeviceOptimizer):
                _hand_down(inner)


def _hand_down(hybrid: HybridDeviceOptimizer) -> None:
    """Give what was loaded to the optimizers that it is made of, as where Megatron loads by itself. They count steps; the count that a load
    leaves beside theirs would be handed to them anew in every step, and never rise (0.16.1)."""
    hybrid._sync_hdo_state_to_sub_optimizers()
    for group in hybrid.param_groups:
        group.pop("step", None)


def optimizer_state(optimizer: Any, model: dict[str, Any], *, masters_are_weights: bool = False) -> OptimizerShards:
    """`masters_are_weights`: the masters are read from the weights of a checkpoint that has no masters of its own."""
    entries = {entry.data: entry for entry in nested_values(model) if isinstance(entry, ShardedTensor | ShardedTensorFactory)}
    shards: dict[str, ShardedTensor] = {}
    owned: list[tuple[Any, Tensor, dict[str, Tensor]]] = []
    for each in _distributed(optimizer):
        for weight, (start, stop) in owned_ranges(each):
            tensors = each._get_main_param_and_optimizer_states(weight)
            owned.append((each, weight, tensors))
            for name in _stored(tensors, has_masters=each.config.bf16):
                prefix = "" if name == "param" and masters_are_weights else f"{_STATE}.{name}."
                for shard in _shards(entries[weight], tensors[name], start, stop, prefix):
                    shards[f"{name}.{shard.key}{list(shard.global_offset)}"] = shard
    return OptimizerShards(shards, owned)


def _stored(tensors: Iterable[str], *, has_masters: bool) -> list[str]:
    """Not the count of steps, which is one for all, and not the masters where the weights themselves are the masters."""
    return [name for name in tensors if name != "step" and (name != "param" or has_masters)]


def _distributed(optimizer: Any) -> list[Any]:
    """Megatron's DistributedOptimizers that have parameters on this rank: of dense ones, and of experts where its stage has some."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [each for each in chained if not each.is_stub_optimizer and any(group["params"] for group in each.optimizer.param_groups)]


def _shards(entry: ShardedTensor | ShardedTensorFactory, owned: Tensor, start: int, stop: int, prefix: str) -> Iterator[ShardedTensor]:
    """`owned` holds elements [start, stop) of the flattened weight of `entry`."""
    for piece, begin in _pieces(entry):
        numel = piece.data.numel()
        inside = max(start - begin, 0), min(stop - begin, numel)
        if inside[0] >= inside[1]:
            continue
        leading, at = piece.prepend_axis_num, inside[0] + begin - start
        for box in boxes_of_range(tuple(piece.local_shape), *inside):
            shape = (1,) * leading + box.shape
            size = torch.Size(shape).numel()
            offset = (0,) * leading + box.offset
            yield ShardedTensor(
                key=prefix + piece.key,
                data=owned[at : at + size].view(shape),
                dtype=owned.dtype,
                local_shape=shape,
                global_shape=tuple(piece.global_shape),
                global_offset=tuple(a + b for a, b in zip(piece.global_offset, offset, strict=True)),
                axis_fragmentations=None,  # not a regular grid
                # The ranges of data-parallel ranks are disjoint: only replicas over other axes remain.
                replica_id=(*piece.replica_id[:2], 0),
                allow_shape_mismatch=piece.allow_shape_mismatch,
            )
            at += size


def _pieces(entry: ShardedTensor | ShardedTensorFactory) -> Iterator[tuple[ShardedTensor, int]]:
    """(part of the weight with a key and an offset of its own, where it begins in the flattened weight): gate and up of an MLP."""
    plain = replace(entry, data=torch.empty(entry.data.shape, device="meta", dtype=entry.data.dtype))
    built = [plain] if isinstance(plain, ShardedTensor) else nested_values(plain.build())
    for piece in built:
        assert piece.data.is_contiguous(), f"{piece.key}: Megatron splits this weight across its rows"
        yield piece, piece.data.storage_offset()


# -- random streams --------------------------------------------------------------------------------------------


def rng_state(rank: int, num_ranks: int) -> ShardedObject:
    """States of the random streams of each rank, PyTorch's and Megatron's.

    Dropout, router jitter and forced load balancing are refused, so that only an objective of a user's may draw from them. Sampling seeds
    and the data order are functions of the run's seed and have no state.
    """
    states = {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "megatron": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    return ShardedObject("rng", states, (num_ranks,), (rank,))


def set_rng_state(states: dict[str, Any]) -> None:
    """Streams of the device start anew where the checkpoint is another kind of device's: a GPU's state is not of a CPU's form."""
    torch.set_rng_state(states["cpu"])
    if len(states["cuda"]) != len(torch.cuda.get_rng_state()):
        logger.info("another kind of device than the checkpoint's: its random streams start anew")
        return
    torch.cuda.set_rng_state(states["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["megatron"])
