"""Export of one model by the native bridge against those of other packages, in turns, on the same ranks; every byte is compared.

    python benchmarks/export.py --rounds 5 --against mbridge megatron_bridge

Qwen3-MoE shapes under tp2 pp2 ep2 on four processes. What is timed is a whole export, from a barrier to a barrier.
Ends with status 1 and the errors of the ranks if one of them fails.
"""

import argparse
import multiprocessing
import multiprocessing.connection
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from moerl.config.schema.layout import Layout
from moerl.config.schema.model_config import ScratchModel
from moerl.config.schema.train_config import OptimizerConfig, TrainConfig
from moerl.scratch_model import write_scratch_model

LAYOUT = Layout(ranks=4, tp=2, pp=2, ep=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", nargs="+", choices=["mbridge", "megatron_bridge"], default=["mbridge"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        sizes = {"hidden_size": options.hidden, "num_heads": 8, "num_kv_heads": 2, "head_dim": options.hidden // 8}
        experts = {"ffn_size": options.hidden, "num_layers": options.layers, "num_experts": options.experts}
        write_scratch_model(ScratchModel(family="qwen3_moe", **sizes, **experts), 64, model, seed=0)
        names = ["native", *options.against]
        context = multiprocessing.get_context("spawn")
        ranks = [
            context.Process(target=rank_main, args=(rank, Path(directory), model, names, options.rounds)) for rank in range(LAYOUT.ranks)
        ]
        for process in ranks:
            process.start()
        if failed := failed_ranks(ranks):
            sys.exit("\n".join(f"rank {rank} ended with {code}:\n{error_file(Path(directory), rank).read_text()}" for rank, code in failed))


def failed_ranks(ranks: list[Any]) -> list[tuple[int, int]]:
    """(rank, exit code) of those that failed by themselves. After the first, the others, which wait for it, are ended."""
    running, failed = dict(enumerate(ranks)), []
    while running and not failed:
        multiprocessing.connection.wait([process.sentinel for process in running.values()])
        ended = {rank: process for rank, process in running.items() if process.exitcode is not None}
        running = {rank: process for rank, process in running.items() if rank not in ended}
        failed = [(rank, process.exitcode) for rank, process in ended.items() if process.exitcode != 0]
    for process in running.values():
        process.terminate()
        process.join()
    return failed


def error_file(directory: Path, rank: int) -> Path:
    return directory / f"rank{rank}.stderr"


def rank_main(rank: int, directory: Path, model: Path, names: list[str], rounds: int) -> None:
    os.dup2(os.open(error_file(directory, rank), os.O_WRONLY | os.O_CREAT), 2)
    import megatron_patches

    warnings.simplefilter("ignore")
    megatron_patches.activate()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=LAYOUT.ranks)
    from moerl.train.megatron.megatron_model import build_model
    from moerl.train.megatron.process_groups import initialize_groups

    initialize_groups(LAYOUT, 1)
    bridges = {}
    for name in names:
        train = TrainConfig(optimizer=OptimizerConfig(lr=1e-6), layout=LAYOUT, dtype="bfloat16", bridge=name)
        bridges[name] = build_model(model, train, max_context=64).bridge
    load(bridges, model)
    compare(bridges)
    seconds: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, bridge in bridges.items():
            seconds.setdefault(name, []).append(export_seconds(bridge))
    if rank == 0:
        report({name: statistics.median(values) for name, values in seconds.items()}, seconds)
    dist.barrier()
    dist.destroy_process_group()


def load(bridges: dict[str, Any], model: Path) -> None:
    from moerl.models.hf_checkpoint import HFCheckpoint

    for bridge in bridges.values():
        with HFCheckpoint(model) as checkpoint:
            bridge.load(checkpoint)


def compare(bridges: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    native, *others = ({name: tensor.clone() for name, tensor in bridge.export(torch.bfloat16)} for bridge in bridges.values())
    if dist.get_rank() == 0:
        for other in others:
            assert native.keys() == other.keys()
            differing = [name for name in native if not native[name].equal(other[name])]
            assert not differing, differing
        print(f"{sum(tensor.nbytes for tensor in native.values()) / 1e6:.1f} MB in {len(native)} tensors, every byte equal", flush=True)


def export_seconds(bridge: Any) -> float:
    import torch
    import torch.distributed as dist

    dist.barrier()
    begin = time.perf_counter()
    for _ in bridge.export(torch.bfloat16):
        pass
    dist.barrier()
    return time.perf_counter() - begin


def report(median: dict[str, float], seconds: dict[str, list[float]]) -> None:
    for name, value in median.items():
        print(f"{name:15} median {value:.3f} s of {', '.join(f'{each:.3f}' for each in seconds[name])}")
    for name in list(median)[1:]:
        print(f"{name} / native = {median[name] / median['native']:.2f}")


if __name__ == "__main__":
    main()
