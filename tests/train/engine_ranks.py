"""Real Megatron engines on gloo ranks, one process each, forked from a server that has Megatron loaded and patched.

The test process itself is never patched: the patches replace torch.cuda for good.
"""

import multiprocessing as mp
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moerl.config.layout import Layout
from moerl.config.schema import OptimizerConfig, TrainConfig
from moerl.train.settings import EngineSettings
from moerl.types import TrainBatch

DEADLINE_SECONDS = 120


def settings(model_dir: Path, layout: Layout, *, micro_batch_tokens: int = 64, dtype: str = "float32", **options: Any) -> EngineSettings:
    train = TrainConfig(optimizer=OptimizerConfig(lr=1e-3), layout=layout, dtype=dtype, micro_batch_tokens=micro_batch_tokens)
    defaults = {"max_context": 32, "temperature": 1.0, "uses_reference": False, "export_dtype": dtype}
    return EngineSettings(train=train, model_dir=model_dir, **(defaults | options))


def random_batch(*, vocab_size: int = 90, num_sequences: int = 13) -> TrainBatch:
    """Sequences of 4 to 19 tokens whose first two are the prompt; log-probs near uniform."""
    rng = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(4, 20, size=num_sequences))])
    total = offsets[-1]
    mask_T = np.ones(total, dtype=bool)
    for start in offsets[:-1]:
        mask_T[start : start + 2] = False
    return TrainBatch(
        token_ids_T=rng.integers(5, vocab_size, size=total),
        response_mask_T=mask_T,
        rollout_logprobs_T=(rng.normal(size=total) * 0.01 - 4.5).astype(np.float32),
        advantages_T=rng.normal(size=total).astype(np.float32),
        offsets=offsets,
    )


def run_ranks(job: Callable[..., Any], chosen: EngineSettings, store: Path, *args: Any, patches: Sequence[str] | None = None) -> Any:
    """What `job(engine, *args)` returned on rank 0, run on every rank. `patches`: only these, instead of all that are needed."""
    preload = "engine_preload" if patches is None else "moerl.types"
    context = mp.get_context("forkserver" if patches is None else "spawn")
    if patches is None:
        context.set_forkserver_preload([preload])
    queue = context.Queue()
    num_ranks = chosen.train.layout.ranks
    ranks = [context.Process(target=_rank, args=(rank, chosen, str(store), job, args, patches, queue)) for rank in range(num_ranks)]
    for process in ranks:
        process.start()
    try:
        outcomes = [queue.get(timeout=DEADLINE_SECONDS) for _ in ranks]
    finally:
        for process in ranks:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
    failures = [text for _, text, _ in sorted(outcomes, key=lambda o: o[0]) if text]
    if failures:
        raise RuntimeError(min(failures, key=lambda text: "closed by peer" in text))
    return next(value for rank, _, value in outcomes if rank == 0)


def _rank(rank: int, chosen: EngineSettings, store: str, job: Any, args: Any, patches: Any, queue: Any) -> None:
    torch.set_num_threads(1)
    try:
        import megatron_patches

        if patches is not None:
            megatron_patches.PATCHES = tuple(p for p in megatron_patches.PATCHES if p.NAME in patches)
        megatron_patches.activate()
        from moerl.train.engine import MegatronEngine
        from moerl.train.model import initialize_groups

        num_ranks = chosen.train.layout.ranks
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
        initialize_groups(chosen.train.layout, 1)
        value = job(MegatronEngine(chosen), *args)
        megatron_patches.assert_active()
        queue.put((rank, "", value if rank == 0 else None))
    except BaseException:
        queue.put((rank, traceback.format_exc(), None))
    finally:
        queue.close()
        queue.join_thread()
