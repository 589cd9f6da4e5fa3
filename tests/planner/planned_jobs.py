"""Measurements of memory that ranks of the planner's tests make. Every function runs on every rank; rank 0's value goes to the test."""

import gc
import pickle
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from engine_jobs import new_engine
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from moerl.algorithms.mini_batch_loss import loss_of
from moerl.config.algorithm_settings import algorithm
from moerl.config.schema.train_config import TrainConfig
from moerl.train.engine_settings import EngineSettings
from moerl.types.batch import TrainBatch
from moerl.types.errors import OutOfDeviceMemory


def trained_bytes(settings: EngineSettings, batch: TrainBatch) -> list[dict[str, int]]:
    """Bytes of each rank after an update."""
    engine = new_engine(settings)
    engine.update(batch, loss_of(algorithm("grpo")), lr=1e-3, num_updates=1)
    buffers = [buffer for chunk in engine.model.wrapped for buffer in chunk.buffers + chunk.expert_parallel_buffers]
    optimizers = engine.optimizer.chained_optimizers
    states = [value for each in optimizers for state in each.optimizer.state.values() for value in state.values()]
    if settings.train.dtype == "bfloat16":
        states += [shard for each in optimizers for group in each.shard_fp32_from_float16_groups for shard in group if shard is not None]
    mine = {
        "rank": dist.get_rank(),
        "weights": sum(buffer.param_data.nbytes for buffer in buffers),
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
        "optimizer": sum(state.nbytes for state in states if isinstance(state, torch.Tensor) and state.ndim > 0),
        "reference": 0 if engine._reference is None else sum(tensor.nbytes for tensor in engine._reference),
    }
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def held_bytes(settings: EngineSettings) -> list[dict[str, int]]:
    """Bytes of each rank by kind, when it has been built."""
    held = new_engine(settings)._memory.bytes()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, {kind: each.device for kind, each in held.items()})
    return found


def built_sizes(cases: Sequence[tuple[Mapping[str, Any], TrainConfig, Sequence[int]]]) -> list[dict[tuple[int, int], Any]]:
    """Of stages of each case by (stage, chunk): elements of every parameter, of the buffers, and of a rank's shard of them. Megatron
    builds them on meta tensors, so that their size does not matter. Replaces the process's default group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    found = [_built(*case) for case in cases]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    return found


def _built(hf: Mapping[str, Any], train: TrainConfig, stages: Sequence[int]) -> dict[tuple[int, int], tuple[list[int], int, int]]:
    from on_meta import as_rank

    from moerl.train.megatron.megatron_model import _wrap, build_chunks

    layout, found = train.layout, {}
    for stage in stages:
        with as_rank(stage * (layout.ranks // layout.pp), layout), torch.device("meta"):
            built = build_chunks(hf, train, max_context=32)
            for number, chunk in enumerate(built.chunks):
                wrapped = _wrap(built.config, train, chunk, is_first=number == 0)
                buffers = wrapped.buffers + wrapped.expert_parallel_buffers
                found[stage, number] = (
                    sorted(parameter.numel() for parameter in chunk.parameters()),
                    sum(buffer.numel for buffer in buffers),
                    sum(buffer.numel // buffer.data_parallel_world_size for buffer in buffers),
                )
    return found


def tensors_of_models(cases: Sequence[tuple[Mapping[str, Any], TrainConfig]]) -> list[list[Any]]:
    """Of a push of each model, built on meta tensors. Replaces the process's default group."""
    from on_meta import built_tensors
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    found = [built_tensors(hf, train, max_context=32, dtype="bfloat16", with_mtp=train.mtp_loss > 0) for hf, train in cases]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    return found


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Bytes that autograd keeps of a micro-batch on a rank, without parameters, and tokens that the experts of a layer got, on average."""

    num_bytes: int
    routed: float


def kept_bytes(cases: Sequence[tuple[Mapping[str, Any], TrainConfig]], num_tokens: int, num_sequences: int) -> list[Kept]:
    """Of models on one layout, whose groups exist not yet: one chunk with every layer, before its loss."""
    from moerl.train.megatron.process_groups import initialize_groups

    layout = cases[0][1].layout
    initialize_groups(layout, 1)
    return [_kept(hf, train, num_tokens, num_sequences) for hf, train in cases]


def _kept(hf: Mapping[str, Any], train: TrainConfig, num_tokens: int, num_sequences: int) -> Kept:
    from megatron.core.packed_seq_params import PackedSeqParams

    from moerl.train.megatron.megatron_model import _wrap, build_chunks

    torch.manual_seed(0)
    built = build_chunks(hf, train, max_context=num_tokens)
    (chunk,) = built.chunks
    wrapped = _wrap(built.config, train, chunk, is_first=True)
    storages = SavedStorages(tensor.untyped_storage() for tensor in (*chunk.parameters(), *chunk.buffers()))
    routed: list[int] = []
    for name, module in chunk.named_modules():
        if name.endswith("mlp.experts"):
            module.register_forward_pre_hook(lambda _, inputs: routed.append(len(inputs[0])))
    length, local = num_tokens // num_sequences, num_tokens // train.layout.cp
    bounds = torch.arange(0, num_tokens + 1, length, dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=length, max_seqlen_kv=length)
    tokens = torch.randint(0, hf["vocab_size"], (1, local), generator=torch.Generator().manual_seed(dist.get_rank()))
    with torch.autograd.graph.saved_tensors_hooks(storages.pack, storages.unpack):
        outputs = wrapped(tokens, torch.arange(local)[None], None, packed_seq_params=packed)
    kept = storages.num_bytes()
    del outputs
    return Kept(num_bytes=kept, routed=sum(routed) / len(routed) if routed else 0.0)


class SavedStorages:
    """Storages that autograd keeps, each once, as long as a node that saved one of its views is there; and the most of them at a time."""

    def __init__(self, others: Iterable[torch.UntypedStorage]):
        """`others`: those that are not counted."""
        self._others = {storage._cdata for storage in others}
        self._held: dict[int, tuple[torch.UntypedStorage, int]] = {}
        self.most = 0

    def pack(self, tensor: torch.Tensor) -> "Any":
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._others:
            return tensor
        self._held[key] = storage, self._held[key][1] + 1 if key in self._held else 1
        self.most = max(self.most, self.num_bytes())
        return _Saved(tensor, lambda: self._release(key))

    def unpack(self, saved: Any) -> torch.Tensor:
        return saved.tensor if isinstance(saved, _Saved) else saved

    def num_bytes(self) -> int:
        """An output that is recomputed has no bytes while it is away."""
        return sum(storage.nbytes() for storage, _ in self._held.values())

    def _release(self, key: int) -> None:
        storage, count = self._held.pop(key)
        if count > 1:
            self._held[key] = storage, count - 1


class _Saved:
    def __init__(self, tensor: torch.Tensor, released: Callable[[], None]):
        self.tensor, self._released = tensor, released

    def __del__(self) -> None:
        self._released()


def most_kept_bytes(settings: EngineSettings, batch: TrainBatch) -> list[int]:
    """Of each rank in an update, as `Kept.num_bytes`, at the worst moment: micro-batches under way and what is recomputed."""
    engine = new_engine(settings)
    parameters = [tensor for chunk in engine.model.chunks for tensor in (*chunk.parameters(), *chunk.buffers())]
    storages = SavedStorages(tensor.untyped_storage() for tensor in parameters)
    with torch.autograd.graph.saved_tensors_hooks(storages.pack, storages.unpack):
        engine.update(batch, loss_of(algorithm("grpo")), lr=1e-3, num_updates=1)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, storages.most)
    return found


class LiveStorages(TorchDispatchMode):
    """Storages that operations made and that are still there: their bytes, and the most at a time."""

    def __init__(self) -> None:
        super().__init__()
        tensors = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in tensors}
        """Those that were there before have none."""
        self._now = 0
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for tensor in tree_iter(outputs):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._sizes:
                self._note(tensor.untyped_storage())
        return outputs

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._sizes[key] = size
        self._now += size
        self.most = max(self.most, self._now)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._now -= self._sizes.pop(key)


def most_live_bytes(settings: EngineSettings, batch: TrainBatch) -> int:
    """Of one rank in an update, after one that made what stays: every tensor there is while micro-batches run."""
    engine = new_engine(settings)
    objective = loss_of(algorithm("grpo"))
    engine.update(batch, objective, lr=1e-3, num_updates=1)
    with LiveStorages() as live:
        engine.update(batch, objective, lr=1e-3, num_updates=1)
    return live.most


def filled_gpu(settings: EngineSettings, batch: TrainBatch) -> tuple[str, int, dict[str, int], str, Any]:
    """What an update of the last stage ends with when its ranks find no memory, and what is left of it behind a pipe."""
    engine = new_engine(settings)
    engine.update(batch, loss_of(algorithm("grpo")), lr=1e-3, num_updates=1)

    def no_memory(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB.\nGPU 0 has a total capacity of 79.11 GiB")

    engine.step.mini_batch = no_memory
    try:
        engine.update(batch, loss_of(algorithm("grpo")), lr=1e-3, num_updates=1)
    except OutOfDeviceMemory as error:
        mine = (error.call, error.stage, dict(error.held), str(error), pickle.loads(pickle.dumps(error)))
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found[-1]
