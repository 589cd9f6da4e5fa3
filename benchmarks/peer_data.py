"""A step's samples through the driver of moerl and of verl, and micro-batches planned by both (make bench-peers makes the environment).

    python benchmarks/peer_data.py --samples 2048 --tokens 1024

moerl: benchmarks/data_plane.py, way `collectors`, over HTTP from servers with canned tokens. verl: benchmarks/peers/verl_data.py,
from Ray actors that make the samples. MB are the driver's above those before the step: at its end, and the most of it; shared are pages of
Ray's object store. CPU: of the driver alone.

Plans: the lengths and measures of benchmarks/balance.py, without padding. Driver and ranks of moerl each make the whole plan; verl's driver
shares the samples out, and a rank makes its own micro-batches.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from balance import ATTENTION_TOKENS, DISTRIBUTIONS

from moerl.train.batching.micro_batch_plan import Balance, Bins, MicroBatchPlanner

HERE = Path(__file__).parent
PEERS = HERE.parent / ".venv-peers" / "bin" / "python"
COLUMNS = ("private", "shared", "peak_private", "peak_shared")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=1024, help="of a response")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=32, help="of the plans")
    parser.add_argument("--budget", type=int, default=32768, help="tokens of a micro-batch of the plans")
    parser.add_argument("--without-verl", action="store_true")
    options = parser.parse_args()
    if not (options.without_verl or PEERS.exists()):
        raise SystemExit(f"{PEERS} is not there: `make bench-peers` makes it")
    ways = ["moerl"] if options.without_verl else ["moerl", "dataproto", "transfer_queue"]
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(options.rounds):
        for way in ways:
            found[way].append(driver(way, options))
    print(f"{options.samples} samples of 256 + {options.tokens} tokens, routes of 4 layers, top 4; medians of {options.rounds} rounds\n")
    print(f"| driver of | {' | '.join(f'{name}, MB' for name in COLUMNS)} | CPU, ms a sample |\n|{' --- |' * 6}")
    for way, rows in found.items():
        middle = {name: float(np.median([row[name] for row in rows])) for name in (*COLUMNS, "cpu")}
        print(f"| {way} | {' | '.join(f'{middle[name] / 1e6:.0f}' for name in COLUMNS)} | {middle['cpu'] * 1e3:.2f} |")
    print(f"\n{options.samples * 4} samples, {options.ranks} ranks, {options.budget} tokens\n")
    print(f"| mean length | plan | rounds | ranks | rounds waited for | driver, CPU s | a rank, CPU s |\n|{' --- |' * 7}")
    for mu, sigma in DISTRIBUTIONS:
        compare_plans(mu, sigma, options)


def driver(way: str, options: argparse.Namespace) -> dict[str, float]:
    """Bytes and CPU seconds of the driver in a process of its own."""
    if way == "moerl":
        sizes = ["--samples", str(options.samples), "--tokens", str(options.tokens)]
        return last_json([sys.executable, str(HERE / "data_plane.py"), *sizes, "--way", "collectors"], "")
    task = dict(samples=options.samples, prompt=256, tokens=options.tokens, group=8, layers=4, top_k=4, ranks=2, loops=2)
    return verl(way, task)


def verl(way: str, task: dict[str, Any]) -> dict[str, Any]:
    return last_json([str(PEERS), str(HERE / "peers" / "verl_data.py"), way], json.dumps(task))


def last_json(command: list[str], given: str) -> dict[str, Any]:
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare_plans(mu: float, sigma: float, options: argparse.Namespace) -> None:
    lengths = np.random.default_rng(0).lognormal(mu, sigma, options.samples * 4).astype(np.int64).clip(16, options.budget)
    plans: dict[str, tuple[list[Bins], float, float]] = {}
    for name, waits in (("moerl, even ranks", False), ("moerl, even rounds", True)):
        began = time.process_time()
        plan = MicroBatchPlanner(
            num_ranks=options.ranks, token_budget=options.budget, token_multiple=1, attention_tokens=ATTENTION_TOKENS, waits_in_rounds=waits
        ).plan(lengths)
        cpu = time.process_time() - began
        plans[name] = plan, cpu, cpu
    if not options.without_verl:
        told = verl("plan", {"lengths": lengths.tolist(), "ranks": options.ranks, "budget": options.budget})
        plans["verl"] = told["plan"], told["cpu"], told["rank_cpu"]
    for name, (plan, cpu, rank_cpu) in plans.items():
        of = Balance.of(plan, lengths, sequence_multiple=1, attention_tokens=ATTENTION_TOKENS)
        cells = f"{len(plan[0])} | {of.rank_imbalance:.4f} | {of.round_imbalance:.4f} | {cpu:.2f} | {rank_cpu:.2f}"
        print(f"| {lengths.mean():.0f} | {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
