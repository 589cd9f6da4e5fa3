"""One training rank per GPU that goes through the states of its memory and reports what CUDA's allocator says in each."""

import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(settings: Any, batch: Any, *, num_ranks: int, sleeps: bool) -> list[dict[str, Any]]:
    """Rank 0's report of every step: allocated and free bytes by state, the engine's own accounting, loss and gradient norm."""
    with tempfile.TemporaryDirectory() as directory:
        answer = Path(directory) / "answer"
        mp.spawn(_rank, args=(num_ranks, Path(directory) / "store", settings, batch, sleeps, answer), nprocs=num_ranks)
        return torch.load(answer, weights_only=False)


def _rank(rank: int, num_ranks: int, store: Path, settings: Any, batch: Any, sleeps: bool, answer: Path) -> None:
    import megatron_patches

    torch.cuda.set_device(rank)
    megatron_patches.activate(with_reference=settings.train.reference_te)
    from moerl.algorithms.algorithm import loss_of
    from moerl.config.algorithm_settings import algorithm
    from moerl.train.megatron.megatron_model import initialize_groups
    from moerl.train.megatron_engine import MegatronEngine

    timeout = timedelta(seconds=300)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=timeout)
    engine = MegatronEngine(settings, initialize_groups(settings.train.layout, 1, reloadable=settings.train.destroy_groups))
    reports = []
    for _ in range(3):
        before_T = engine.logprobs(batch)
        scoring = _memory()
        stats = engine.update(batch, loss_of(algorithm("grpo")), lr=1e-3, num_updates=1)
        training, asleep = _memory(), None
        if sleeps:
            engine.sleep()
            asleep = _memory()
            engine.wake()
        reports.append({"scoring": scoring, "training": training, "asleep": asleep, "stats": stats, "before_T": before_T})
    if rank == 0:
        torch.save(reports, answer)
    dist.barrier()
    dist.destroy_process_group()


def _memory() -> dict[str, int]:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return {"allocated": torch.cuda.memory_allocated(), "free": torch.cuda.mem_get_info()[0]}
