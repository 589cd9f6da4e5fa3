"""Every benchmark runs and prints its table; sizes are too small for figures that mean something."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.matrix

DIRECTORY = Path(__file__).parents[2] / "benchmarks"
SMALL = {
    "balance": "--samples 64 --ranks 4",
    "checkpoint_save": "--hidden 32 --experts 2 --ranks 2 --saves 1",
    "checkpoint_load": "--hidden 32 --experts 2 --ranks 2 --loads 1",
    "collapse": "--seeds 1 --steps 2 --case tis+r3 --case opsm --out collapse.jsonl --plot collapse.svg",
    "convert": "--gigabytes 0.01 --rounds 1",
    "data_plane": "--samples 64 --tokens 128",
    "footprint": "--rounds 1",
    "exchange": "--ranks 2 --kilobytes 16 --calls 2 --repeats 1",
    "export": "--hidden 32 --layers 2 --experts 4 --rounds 1 --against mbridge",
    "learn": "--seeds 1 --steps 1 --out learn.jsonl grpo",
    "logprobs": "--tokens 128 --vocabulary 512 --chunk 64 --left 8 --repeats 1",
    "long_tail": "--steps 2 --groups 8 --servers 1 --caches 20000",
    "memory": "--hidden 32 --layers 2 --tokens 128 --repeats 1",
    "peer_data": "--samples 64 --tokens 128 --rounds 1 --ranks 4 --without-verl",
    "peers": "--tokens 4 --steps 2 --warmup 1 --rounds 1 --threads",
    "pool": "--requests 128 --servers 2 --tokens 64",
    "push": "--hidden 32 --layers 2 --experts 4 --ffn 32 --bucket-megabytes 1 --rounds 1",
    "rank_sockets": "--ranks 4",
    "scoring": "--samples 64 --rounds 1",
    "server_requests": "--requests 8 32 --running 4 --rounds 1",
    "start": "--ranks 1 --rounds 1",
    "update_ranks": "--tokens 128 --vocabulary 512 --micro-batches 2 --repeats 1",
    "update_parts": "--tokens 128 --length 32 --vocabulary 512 --micro-batches 2 --repeats 1",
    "update_overhead": "--tokens 128 --vocabulary 512 --micro-batches 2 --repeats 1",
    "weight_push": "--megabytes 8 --bucket-megabytes 1 --repeats 1",
}


def test_each_has_a_small_size():
    others = {"cached_server", "canned_servers", "driver_memory", "peer_task", "push_rank", "push_server", "slurm_start", "watched_run"}
    assert {file.stem for file in DIRECTORY.glob("*.py")} - others == set(SMALL)


@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_prints_a_table(name: str, tmp_path: Path):
    command = [sys.executable, str(DIRECTORY / f"{name}.py"), *SMALL[name].split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) > 1
