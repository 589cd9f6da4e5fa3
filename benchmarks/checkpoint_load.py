"""What loading a checkpoint reads and how long it takes: digests made of what is read, against digests first and Megatron's loader after.

    python benchmarks/checkpoint_load.py --hidden 256 --ranks 2

Both take turns in one run, each after the kernel was told to forget the files. Bytes are those of every call that reads, of all ranks.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from checkpoint_save import new_engine, on_ranks, timed, write_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--loads", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as root:  # not in memory, as /tmp may be
        model_dir = write_model(Path(root) / "model", arguments.hidden, arguments.experts)
        on_ranks(run_rank, arguments.ranks, Path(root), model_dir, arguments.loads)


def run_rank(rank: int, num_ranks: int, root: Path, model_dir: Path, num_loads: int) -> None:
    engine = new_engine(rank, num_ranks, root, model_dir)
    import torch.distributed as dist  # which only patched processes may

    directory = root / "saved"
    files = save(engine, directory)
    ways = {"once": lambda: engine.shards.load(directory, files), "digests first": lambda: load_in_two(engine, directory, files)}
    rows: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    for _ in range(num_loads + 1):
        for name, load in ways.items():
            forget(directory, files)
            before, begun = bytes_read(), time.process_time()
            seconds, _ = timed(load)
            rows[name].append((seconds, sum(gathered(time.process_time() - begun)), sum(gathered(bytes_read() - before))))
    if rank == 0:
        report(rows, num_ranks, sum(size for size, _ in files.values()))
    dist.barrier()
    dist.destroy_process_group()


def save(engine: Any, directory: Path) -> dict[str, tuple[int, str]]:
    import torch.distributed as dist

    directory.mkdir(exist_ok=True)
    engine.shards.stage(copies=False)
    written = gathered(engine.shards.writer.write(directory))
    told = [engine.shards.writer.finish(directory, [share.index for share in written]) if dist.get_rank() == 0 else {}]
    dist.broadcast_object_list(told, src=0)
    return {name: entry for share in (*(each.files for each in written), told[0]) for name, entry in share.items()}


def load_in_two(engine: Any, directory: Path, files: dict[str, tuple[int, str]]) -> None:
    """Every rank compares its share of the files; then Megatron reads what each rank needs, in all ranks that need it."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    from moerl.train.checkpoint import sharded_state
    from moerl.train.checkpoint.checkpoint_dirs import digest_files

    share = sorted(files)[dist.get_rank() :: dist.get_world_size()]
    assert digest_files(directory, share) == {name: files[name] for name in share}
    common = dist_checkpointing.load_common_state_dict(str(directory))
    sharded_state.allocate_optimizer_state(engine.optimizer, common["optimizer_steps"])
    model = sharded_state.model_state(engine.model.chunks)
    optimizer = sharded_state.optimizer_state(engine.optimizer, model)
    state = dist_checkpointing.load({"model": model}, str(directory))
    dist_checkpointing.load(optimizer.shards, str(directory))
    for index, chunk in enumerate(engine.model.chunks):
        chunk.load_state_dict(state["model"][f"chunk{index}"])
    optimizer.install()


def forget(directory: Path, files: dict[str, tuple[int, str]]) -> None:
    """Drop the files from the kernel's cache of pages."""
    for name in files:
        descriptor = os.open(directory / name, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def bytes_read() -> int:
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["rchar"])


def gathered(value: Any) -> list[Any]:
    import torch.distributed as dist

    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def report(rows: dict[str, list[tuple[float, float, float]]], num_ranks: int, stored: int) -> None:
    """Medians over all loads but the first of each way."""
    print(f"{num_ranks} ranks, {stored / 1e6:.0f} MB on disk")
    middle = {name: [median(each) for each in zip(*loads[1:], strict=True)] for name, loads in rows.items()}
    for name, (seconds, cpu_seconds, num_bytes) in middle.items():
        ratio = seconds / middle["digests first"][0]
        print(
            f"{name:>14}: {num_bytes / stored:.2f} x what is stored read, {seconds:.3f} s ({ratio:.2f}), {cpu_seconds:.2f} s of CPU in all"
        )


if __name__ == "__main__":
    main()
