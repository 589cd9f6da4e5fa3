"""What the memory settings save and cost: bytes and time of an update step, each against the same step without the setting.

    python benchmarks/memory.py --hidden 256 --layers 8

One process on CPU. Activations: bytes that autograd keeps of one micro-batch at the end of its forward pass. Offload: bytes per kind
in each state; on a CPU they go from memory to memory, so their times say what a copy of that size costs, not what a GPU's bus does.
"""

import argparse
import tempfile
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import megatron_patches
from moerl.config.algorithm_settings import algorithm
from moerl.config.schema.layout import Layout
from moerl.config.schema.model_config import ScratchModel
from moerl.config.schema.train_config import FullRecompute, NoRecompute, OptimizerConfig, SelectiveRecompute, TrainConfig
from moerl.scratch_model import write_scratch_model
from moerl.train.engine_settings import EngineSettings
from moerl.types.batch import TrainBatch

WAYS = {
    "none": NoRecompute(),
    "full uniform 1": FullRecompute(),
    "full uniform 2": FullRecompute(num_layers=2),
    "full block 1": FullRecompute(method="block"),
    "core_attn": SelectiveRecompute(modules=("core_attn",)),
    "layernorm": SelectiveRecompute(modules=("layernorm",)),
    "moe_act": SelectiveRecompute(modules=("moe_act",)),
    "layernorm, moe_act": SelectiveRecompute(modules=("layernorm", "moe_act")),
    "moe": SelectiveRecompute(modules=("moe",)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    megatron_patches.activate()
    from moerl.train.megatron.process_groups import initialize_groups

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1, timeout=timedelta(seconds=60))
        initialize_groups(Layout(), 1)
        model_dir = Path(directory) / "model"
        shape = ScratchModel(hidden_size=options.hidden, ffn_size=options.hidden, num_layers=options.layers)
        write_scratch_model(shape, 256, model_dir, seed=0)
        train = TrainConfig(optimizer=OptimizerConfig(lr=1e-4), dtype="bfloat16", micro_batch_tokens=options.tokens)
        settings = EngineSettings(
            train=train, model_dir=model_dir, max_context=256, temperature=1.0, uses_reference=True, export_dtype="bfloat16"
        )
        _recompute(settings, _batch(options.tokens), options.repeats)
        _offload(settings, _batch(options.tokens))
        dist.destroy_process_group()


def _batch(num_tokens: int) -> TrainBatch:
    """Sequences of 256 tokens."""
    rng = np.random.default_rng(0)
    offsets = np.arange(0, num_tokens + 1, 256)
    total = int(offsets[-1])
    return TrainBatch(
        token_ids_T=rng.integers(5, 90, size=total),
        response_mask_T=np.arange(total) % 256 >= 64,
        rollout_logprobs_T=np.full(total, -4.5, dtype=np.float32),
        advantages_T=rng.normal(size=total).astype(np.float32),
        offsets=offsets,
    )


def _recompute(settings: EngineSettings, batch: TrainBatch, repeats: int) -> None:
    print(f"{'recompute':<20} {'activations MB':>15} {'ratio':>6} {'step s':>8} {'ratio':>6}")
    first: tuple[float, float] | None = None
    for name, way in WAYS.items():
        engine = _engine(settings, recompute=way)
        num_bytes = _kept_bytes(engine, batch)
        seconds = min(_update_seconds(engine, batch) for _ in range(repeats))
        first = (num_bytes, seconds) if first is None else first
        ratios = num_bytes / first[0], seconds / first[1]
        print(f"{name:<20} {num_bytes / 1e6:>15.1f} {ratios[0]:>6.2f} {seconds:>8.3f} {ratios[1]:>6.2f}")


def _offload(settings: EngineSettings, batch: TrainBatch) -> None:
    from moerl.train.memory.memory_states import KINDS

    engine = _engine(settings, offload="all")
    for _ in range(2):  # the second time with moments, and with host copies that exist
        engine.sleep()
        engine.wake()
        engine.logprobs(batch)
        stats = _update(engine, batch).memory
    assert stats is not None
    print(f"\n{'state':<10} " + " ".join(f"{kind + ' MB':>14}" for kind in KINDS))
    for state, kinds in stats.device_bytes.items():
        print(f"{state:<10} " + " ".join(f"{kinds[kind] / 1e6:>14.1f}" for kind in KINDS))
    print(f"{'host':<10} " + " ".join(f"{stats.host_bytes[kind] / 1e6:>14.1f}" for kind in KINDS))
    for name, seconds in stats.transition_seconds.items():
        print(f"{name:<22} {seconds:.4f} s")


def _engine(settings: EngineSettings, **changes: Any) -> Any:
    from moerl.train.megatron_engine import MegatronEngine

    return MegatronEngine(replace(settings, train=replace(settings.train, **changes)))


def _update(engine: Any, batch: TrainBatch) -> Any:
    from moerl.algorithms.mini_batch_loss import loss_of

    return engine.update(batch, loss_of(algorithm("grpo")), lr=1e-4, num_updates=1)


def _update_seconds(engine: Any, batch: TrainBatch) -> float:
    begun = time.perf_counter()
    _update(engine, batch)
    return time.perf_counter() - begun


def _kept_bytes(engine: Any, batch: TrainBatch) -> float:
    """Storages that saved tensors hold when the first forward pass has ended, less the parameters'."""
    kept: list[torch.Tensor] = []
    answers: list[int] = []
    parameters = {parameter.untyped_storage()._cdata for chunk in engine.model.chunks for parameter in chunk.parameters()}
    token_logprobs = engine.step.token_logprobs

    def measure(*args: Any, **options: Any) -> Any:
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in kept}
        answers.append(sum(num_bytes for key, num_bytes in storages.items() if key not in parameters))
        return token_logprobs(*args, **options)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    engine.step.token_logprobs = measure
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _update(engine, batch)
    engine.step.token_logprobs = token_logprobs
    return answers[0]


if __name__ == "__main__":
    main()
