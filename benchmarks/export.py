"""Export of one model by the native bridge against mbridge's, in turns, on the same ranks; every byte is compared.

    python benchmarks/export.py --rounds 5

Qwen3-MoE shapes under tp2 pp2 ep2 on four processes. What is timed is a whole export, from a barrier to a barrier.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from moerl.config.layout import Layout
from moerl.config.schema import OptimizerConfig, ScratchModel, TrainConfig
from moerl.models.scratch import write_scratch_model

LAYOUT = Layout(ranks=4, tp=2, pp=2, ep=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        sizes = {"hidden_size": options.hidden, "num_heads": 8, "num_kv_heads": 2, "head_dim": options.hidden // 8}
        experts = {"ffn_size": options.hidden, "num_layers": options.layers, "num_experts": options.experts}
        write_scratch_model(ScratchModel(family="qwen3_moe", **sizes, **experts), 64, model, seed=0)
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=rank_main, args=(rank, Path(directory), model, options.rounds)) for rank in range(LAYOUT.ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()


def rank_main(rank: int, directory: Path, model: Path, rounds: int) -> None:
    import megatron_patches

    warnings.simplefilter("ignore")
    megatron_patches.activate()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=LAYOUT.ranks)
    from moerl.train.model import build_model, initialize_groups

    initialize_groups(LAYOUT, 1)
    bridges = {}
    for name in ("native", "mbridge"):
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
    from moerl.models.checkpoint import HFCheckpoint

    for bridge in bridges.values():
        with HFCheckpoint(model) as checkpoint:
            bridge.load(checkpoint)


def compare(bridges: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    native, other = ({name: tensor.clone() for name, tensor in bridge.export(torch.bfloat16)} for bridge in bridges.values())
    if dist.get_rank() == 0:
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
        print(f"{name:8} median {value:.3f} s of {', '.join(f'{each:.3f}' for each in seconds[name])}")
    print(f"mbridge / native = {median['mbridge'] / median['native']:.2f}")


if __name__ == "__main__":
    main()
