"""How fast checkpoints are converted, against a plain copy of the same files on the same disk in the same run, and in how much memory.

    python benchmarks/convert.py --directory /data/scratch --gigabytes 8

Writes a synthetic checkpoint with the tensors of DeepSeek-V3 (embedding of 129280 x 7168, 256 experts a layer, as many layers as fit)
in bfloat16. Copy and conversions take turns; every one ends when its files are on disk (fsync). Needs about three times the size.
"""

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from moerl.convert.hf.hf_writing import WriteOptions, complete_hf, hf_jobs
from moerl.convert.tensors.entry import Entry
from moerl.convert.tensors.writing import write_files

HIDDEN, EXPERT, VOCABULARY = 7168, 2048, 129280
_CONVERT = """
import resource, sys, time
from pathlib import Path
from moerl.convert.hf.hf_writing import WriteOptions
from moerl.convert.conversion import Conversion, convert
import torch
torch.set_num_threads(1)
before = time.process_time()
start = time.perf_counter()
options = WriteOptions(workers=2)
convert(Conversion(source=Path(sys.argv[1]), target=Path(sys.argv[2]), dtype=sys.argv[3], options=options), dry_run=False)
seconds = time.perf_counter() - start
print(seconds, time.process_time() - before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@dataclass(frozen=True, kw_only=True)
class Measured:
    seconds: float
    cpu_seconds: float
    num_bytes: int
    """Written."""
    peak_bytes: float = 0.0

    @property
    def rate(self) -> float:
        return self.num_bytes / self.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        compare_speeds(Path(directory), arguments.gigabytes, arguments.rounds)


def compare_speeds(root: Path, gigabytes: float, rounds: int) -> None:
    plain, quantized = root / "plain", root / "fp8"
    entries = list(tensors(gigabytes))
    config = {"model_type": "some_of_deepseek_v3", "torch_dtype": "bfloat16"}
    jobs = hf_jobs(entries, WriteOptions(nonfinite="ignore"))
    complete = partial(complete_hf, entries=entries, config=config, carried_from=None, nonfinite="ignore")
    write_files(jobs, plain, plan={}, workers=2, on_bytes=lambda _: None, complete=complete)
    largest = max(entry.num_bytes for entry in entries)
    print(f"{size_of(plain) / 1e9:.2f} GB in {len(entries)} tensors, the largest {largest / 1e9:.2f} GB; load {os.getloadavg()[0]:.1f}")
    rows: dict[str, list[Measured]] = {}
    for _ in range(rounds):
        rows.setdefault("cp of bfloat16", []).append(copied(plain, root / "out"))
        rows.setdefault("bfloat16 -> bfloat16", []).append(converted(plain, root / "out", "keep"))
    rows["bfloat16 -> fp8"] = [converted(plain, quantized, "fp8", keep=True)]
    shutil.rmtree(plain)
    for _ in range(rounds):
        rows.setdefault("cp of fp8", []).append(copied(quantized, root / "out"))
        rows.setdefault("fp8 -> bfloat16", []).append(converted(quantized, root / "out", "bfloat16"))
    report(rows, largest)


def report(rows: dict[str, list[Measured]], largest: int) -> None:
    copy = [each.rate for each in rows["cp of bfloat16"]]
    print("| what | GB/s written (all rounds) | against cp of bfloat16 | CPU seconds per GB | peak RSS, GB (allowed) |")
    print("| --- | --- | --- | --- | --- |")
    for name, results in rows.items():
        rates = [each.rate for each in results]
        every = ", ".join(f"{rate / 1e9:.2f}" for rate in rates)
        cpu = median(each.cpu_seconds / each.num_bytes for each in results) * 1e9
        peak = max(each.peak_bytes for each in results)
        memory = f"{peak / 1e9:.2f} ({(2 * largest + 1e9) / 1e9:.2f})" if peak else ""
        print(f"| {name} | {median(rates) / 1e9:.2f} ({every}) | {median(rates) / median(copy):.2f} | {cpu:.2f} | {memory} |")


def tensors(gigabytes: float) -> Iterator[Entry]:
    """Random bytes would hold NaN: normal numbers, repeated from one block."""
    yield _random("model.embed_tokens.weight", (VOCABULARY, HIDDEN))
    written, layer = VOCABULARY * HIDDEN * 2, 3
    while True:
        prefix = f"model.layers.{layer}"
        shapes = {"self_attn.q_a_proj": (1536, HIDDEN), "self_attn.kv_a_proj_with_mqa": (576, HIDDEN), "self_attn.o_proj": (HIDDEN, 16384)}
        for expert in range(256):
            shapes |= {f"mlp.experts.{expert}.{name}_proj": (EXPERT, HIDDEN) for name in ("gate", "up")}
            shapes[f"mlp.experts.{expert}.down_proj"] = (HIDDEN, EXPERT)
        for name, shape in shapes.items():
            yield _random(f"{prefix}.{name}.weight", shape)
            written += shape[0] * shape[1] * 2
            if written >= gigabytes * 1e9:
                return
        layer += 1


def _random(name: str, shape: tuple[int, int]) -> Entry:
    def pieces() -> Iterator[Tensor]:
        left = shape[0] * shape[1]
        block = torch.randn(min(left, 2**21), generator=torch.Generator().manual_seed(len(name))).bfloat16()
        while left:
            yield block[:left]
            left -= min(left, len(block))

    return Entry(name=name, dtype=torch.bfloat16, shape=shape, pieces=pieces)


def copied(source: Path, target: Path) -> Measured:
    """`cp`, then fsync of every file, one after the other."""
    os.sync()
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(["cp", "-r", "--reflink=never", str(source), str(target)], check=True)
    for file in target.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    num_bytes = size_of(target)
    shutil.rmtree(target)
    cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Measured(seconds=seconds, cpu_seconds=cpu_seconds, num_bytes=num_bytes)


def converted(source: Path, target: Path, dtype: str, *, keep: bool = False) -> Measured:
    """In a process of its own, whose start is not counted."""
    os.sync()
    command = [sys.executable, "-c", _CONVERT, str(source), str(target), dtype]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    seconds, cpu_seconds, peak_bytes = map(float, result.stdout.split())
    num_bytes = size_of(target)
    if not keep:
        shutil.rmtree(target)
    return Measured(seconds=seconds, cpu_seconds=cpu_seconds, num_bytes=num_bytes, peak_bytes=peak_bytes)


def size_of(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.iterdir())


if __name__ == "__main__":
    main()
