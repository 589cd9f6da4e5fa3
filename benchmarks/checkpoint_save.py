"""How long a checkpoint holds training up, staged in the background and written at once, against Megatron's own way of saving.

    python benchmarks/checkpoint_save.py --hidden 256 --ranks 2

The three ways take turns in one run: moerl's with and without background (checkpoint.async_save), and Megatron's
dist_checkpointing.save in its format fully_reshardable. Training is held up inside the save, and in the steps after it while files
are written beside them: those steps are compared with as many steps right before the save.
"""

import argparse
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import megatron_patches

STEPS = 3
"""Optimizer steps before and after each save."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--saves", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        model_dir = write_model(Path(root) / "model", arguments.hidden, arguments.experts)
        on_ranks(run_rank, arguments.ranks, Path(root), model_dir, arguments.saves)


def on_ranks(run: Callable[..., None], num_ranks: int, *place: Any) -> None:
    """Returns when `run(rank, num_ranks, *place)` has ended in a process for every rank."""
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=run, args=(rank, num_ranks, *place)) for rank in range(num_ranks)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()


def new_engine(rank: int, num_ranks: int, root: Path, model_dir: Path) -> Any:
    """Engine of this process as a rank, after one step."""
    import torch

    megatron_patches.activate()
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=num_ranks)
    engine = build_engine(model_dir, num_ranks)
    step(engine)
    return engine


def write_model(directory: Path, hidden: int, experts: int) -> Path:
    from moerl.config.schema.model_config import ScratchModel
    from moerl.scratch_model import write_scratch_model

    shape = ScratchModel(hidden_size=hidden, num_layers=4, num_heads=4, num_kv_heads=2, ffn_size=hidden, num_experts=experts)
    write_scratch_model(shape, 128, directory, seed=0)
    return directory


def run_rank(rank: int, num_ranks: int, root: Path, model_dir: Path, num_saves: int) -> None:
    engine = new_engine(rank, num_ranks, root, model_dir)
    import torch.distributed as dist  # which only patched processes may

    ways = {"background": save_in_background, "at once": save_at_once, "Megatron": save_with_megatron}
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for index in range(num_saves + 1):
        for name, save in ways.items():
            rows[name].append(measure(engine, save, root / f"{name} {index}"))
    if rank == 0:
        report(rows, num_ranks)
    dist.barrier()
    dist.destroy_process_group()


def build_engine(model_dir: Path, num_ranks: int) -> Any:
    from moerl.config.schema.layout import Layout
    from moerl.config.schema.train_config import OptimizerConfig, TrainConfig
    from moerl.train.engine_settings import EngineSettings
    from moerl.train.megatron.process_groups import initialize_groups
    from moerl.train.megatron_engine import MegatronEngine

    layout = Layout(ranks=num_ranks, ep=num_ranks)
    train = TrainConfig(optimizer=OptimizerConfig(lr=1e-4), layout=layout, micro_batch_tokens=512)
    initialize_groups(layout, 0)
    return MegatronEngine(
        EngineSettings(train=train, model_dir=model_dir, max_context=128, temperature=1.0, uses_reference=False, export_dtype="bfloat16")
    )


def step(engine: Any) -> None:
    from moerl.algorithms.mini_batch_loss import SUPERVISED
    from moerl.train.batching.build_batch import sft_batch

    batch = sft_batch([(tuple(range(5, 35)), tuple(range(40, 100))) for _ in range(32)])
    engine.update(batch, SUPERVISED, lr=1e-4, num_updates=1)


def measure(engine: Any, save: Any, directory: Path) -> dict[str, float]:
    """Seconds of the steps before a save, inside it, of the steps after it, and from there until its files are complete."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        directory.mkdir()
    before, _ = timed(lambda: [step(engine) for _ in range(STEPS)])
    inside, wait = timed(lambda: save(engine, directory))
    after, _ = timed(lambda: [step(engine) for _ in range(STEPS)])
    left, _ = timed(wait)
    num_bytes = sum(path.stat().st_size for path in directory.iterdir())
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(directory)
    return {"before": before, "inside": inside, "after": after, "left": left, "bytes": num_bytes}


def timed(call: Any) -> tuple[float, Any]:
    """Until every rank is through."""
    import torch.distributed as dist

    dist.barrier()
    begun = time.perf_counter()
    result = call()
    dist.barrier()
    return time.perf_counter() - begun, result


def save_in_background(engine: Any, directory: Path) -> Any:
    """Returns what waits for the files."""
    import threading

    engine.shards.stage(copies=True)
    writing = threading.Thread(target=engine.shards.writer.write, args=(directory,))
    writing.start()
    return writing.join


def save_at_once(engine: Any, directory: Path) -> Any:
    engine.shards.stage(copies=False)
    engine.shards.writer.write(directory)
    return lambda: None


def save_with_megatron(engine: Any, directory: Path) -> Any:
    from megatron.core import dist_checkpointing, parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "dp_cp_group": group}
    model = engine.model.chunks[0].sharded_state_dict(metadata=metadata)
    optimizer = engine.optimizer.sharded_state_dict(dict(model), is_loading=False, metadata=metadata)
    dist_checkpointing.save({"model": model, "optimizer": optimizer}, str(directory), content_metadata={"plain": True})
    return lambda: None


def report(rows: dict[str, list[dict[str, float]]], num_ranks: int) -> None:
    """Medians over all saves but the first of each way."""
    print(f"{num_ranks} ranks, {rows['background'][-1]['bytes'] / 1e6:.0f} MB on disk")
    middle = {name: {key: median(row[key] for row in ways[1:]) for key in ways[0]} for name, ways in rows.items()}
    for name, each in middle.items():
        ratio = each["inside"] / middle["at once"]["inside"]
        slower = median(row["after"] / row["before"] for row in rows[name][1:])
        print(
            f"{name:>10}: {each['inside']:.3f} s inside the save, {ratio:.2f} x at once, "
            f"{each['inside'] / each['before'] * STEPS:.2f} steps; "
            f"the {STEPS} steps after it take {slower:.2f} x those before; files complete {each['left']:.3f} s later; "
            f"first save {rows[name][0]['inside']:.2f} s"
        )


if __name__ == "__main__":
    main()
