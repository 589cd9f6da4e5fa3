"""The demo's task by `moerl train` and by trl's GRPOTrainer with transformers' generate, in turns (make bench-peers makes its environment).

    python benchmarks/peers.py --tokens 8 24 64 --threads 1 2 --steps 60 --rounds 3

Same model, tokenizer, prompts in their order, groups, responses, loss and optimizer (benchmarks/peer_task.py). A step: wall seconds, the
median after the warm-up, and CPU seconds of all processes, the mean; then medians of the rounds. Memory: PSS of all processes together, the
most that was seen in a short run of its own, 5 times a second. Steps can be compared only if both sides learn alike: the last rows say
that. --threads: of trl, a side for each number; moerl's processes have one each. No number: moerl alone. --set: settings of `moerl train`.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from peer_task import overrides, trl_task
from watched_run import Watched, peak_pss, watched

from moerl.config.load import load

ROOT = Path(__file__).parents[1]
PEERS = ROOT / ".venv-peers" / "bin" / "python"
LAST = 10
"""Steps at the end, of which the reward is told."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8], help="of a response")
    parser.add_argument("--threads", type=int, nargs="*", default=[1])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--warmup", type=int, default=5, help="steps that are not measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--experts", default="grouped_mm", help="of transformers: eager, batched_mm or grouped_mm")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="more")
    options = parser.parse_args()
    if options.threads and not PEERS.exists():
        raise SystemExit(f"{PEERS} is not there: `make bench-peers` makes it, or measure moerl alone with --threads and no number")
    for tokens in options.tokens:
        compare(options, tokens)


def compare(options: argparse.Namespace, tokens: int) -> None:
    """Every side in each round, then its memory, and the tables of both."""
    sides = {"moerl": 0} | {f"trl, {threads} thread{'s' * (threads > 1)}": threads for threads in options.threads}
    found: dict[str, list[Watched]] = {side: [] for side in sides}
    for _ in range(options.rounds):
        for side, threads in sides.items():
            with tempfile.TemporaryDirectory() as directory:
                command, environment = commanded(options, tokens, threads, options.steps, Path(directory))
                found[side].append(watched(command, environment, warmup=options.warmup, steps=options.steps))
    memory = {}
    for side, threads in sides.items():
        with tempfile.TemporaryDirectory() as directory:
            memory[side] = peak_pss(*commanded(options, tokens, threads, options.warmup, Path(directory)))
    print(f"\nResponses of {tokens} tokens, {options.steps} steps, medians of {options.rounds} rounds\n")
    print(table(found, memory))
    print("\nmoerl, CPU seconds of a step by process\n")
    print(role_table(found["moerl"]), flush=True)


def commanded(options: argparse.Namespace, tokens: int, threads: int, steps: int, directory: Path) -> tuple[list[str], dict[str, str]]:
    """Command and environment of moerl, or with `threads` of trl; the model is written before."""
    words = overrides(tokens, steps, directory, options.more)
    task = trl_task(load(words), threads=threads, experts=options.experts)
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RAY_ADDRESS")}
    if not threads:
        return [sys.executable, "-m", "moerl", "train", *words], inherited | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    file = directory / "task.json"
    file.write_text(json.dumps(task))
    return [str(PEERS), str(ROOT / "benchmarks/peers/trl_demo.py"), str(file)], inherited | {"OMP_NUM_THREADS": str(threads)}


def table(found: dict[str, list[Watched]], memory: dict[str, int]) -> str:
    """A row for each measure, a column for each side; in brackets moerl's divided by it."""
    rows: list[tuple[str, str, Callable[[Watched], float]]] = [
        ("a step, wall s", ".2f", lambda run: run.step_seconds),
        ("a step, CPU s of all processes", ".2f", lambda run: run.step_cpu),
        ("until the first step's end, s", ".1f", lambda run: run.first_seconds),
        ("until the first step's end, CPU s", ".1f", lambda run: run.first_cpu),
    ]
    lines = [f"| | {' | '.join(found)} |", "| --- |" + " --- |" * len(found)]
    for title, form, value in rows:
        lines.append(_row(title, form, {side: statistics.median(map(value, runs)) for side, runs in found.items()}))
    lines.append(_row("memory, MB (PSS of all processes)", ".0f", {side: peak / 1e6 for side, peak in memory.items()}))
    first = {side: runs[0].rewards for side, runs in found.items()}
    learned = " | ".join(f"{statistics.fmean(rewards[-LAST:]):.3f}" for rewards in first.values())
    reached = " | ".join(str(next((step for step, reward in enumerate(each, 1) if reward > 0.6), "-")) for each in first.values())
    lines += [f"| reward, last {LAST} steps, first round | {learned} |", f"| first step above .6 | {reached} |"]
    return "\n".join(lines)


def _row(title: str, form: str, values: dict[str, float]) -> str:
    ours = values["moerl"]
    cells = [f"{value:{form}}" + (f" ({ours / value:.2f})" if side != "moerl" else "") for side, value in values.items()]
    return f"| {title} | {' | '.join(cells)} |"


def role_table(runs: list[Watched]) -> str:
    """CPU seconds of a step by role, medians of the rounds; what is below a millisecond is left out."""
    steps = [run.step_roles() for run in runs]
    middle = {name: statistics.median(each.get(name, (0, 0.0))[1] for each in steps) for name in steps[0]}
    shown = sorted((name for name in middle if middle[name] >= 1e-3), key=lambda name: -middle[name])
    lines = ["| process | how many | CPU s of a step |", "| --- | --- | --- |"]
    return "\n".join([*lines, *(f"| {name} | {steps[0][name][0]} | {middle[name]:.3f} |" for name in shown)])


if __name__ == "__main__":
    main()
