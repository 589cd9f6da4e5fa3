"""Learning of the demo's task by algorithm: reward of the last ten of 100 steps, and the first step above .6; several seeds each.

    python benchmarks/learn.py --seeds 3 --jobs 2 --out build/learn.jsonl [ALGORITHM ...]

Runs are processes of their own, `--jobs` at a time. What --out holds is not run again.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

RECIPE = "grpo-tiny-moe-1n2g-sync"
MORE = {
    "dapo": ["algorithm.overlong=none"],
    "grpo_muon": ["algorithm=grpo", "train.optimizer.muon={}"],
    "grpo_tis": ["algorithm=grpo", "algorithm.corrections=[{kind: tis}]"],
    "prime": ["outcome_model.right_above=0.05"],  # a digit of eight, else it sees no right answer to learn from
    "reinforce_pp_kl": ["algorithm=reinforce_pp", "algorithm.kl_coefficient=0.001", "algorithm.kl_in=reward"],
}
"""Overrides of algorithms whose own settings are of large models, and of compositions."""
ALGORITHMS = (
    "grpo", "dapo", "dr_grpo", "rloo", "opo", "gpg", "maxrl", "passk", "reinforce_pp", "reinforce_pp_baseline", "remax", "gspo", "cispo",
    "sapo", "gmpo", "clip_cov", "kl_cov", "m2po", "dppo", "grpo_tis", "reinforce_pp_kl",
    "ppo", "prime", "grpo_muon",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithms", nargs="*", default=ALGORITHMS, metavar="ALGORITHM")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("build/learn.jsonl"))
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    done = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    known = {(row["algorithm"], row["seed"], row["steps"]) for row in done}
    wanted = [(name, seed) for seed, name in product(range(options.seeds), options.algorithms)]
    missing = [(name, seed) for name, seed in wanted if (name, seed, options.steps) not in known]
    with ThreadPoolExecutor(options.jobs) as pool, options.out.open("a") as out:
        for row in pool.map(lambda pair: learn(*pair, options.steps), missing):
            out.write(json.dumps(row) + "\n")
            out.flush()
            done.append(row)
    print(table([row for row in done if row["steps"] == options.steps and row["algorithm"] in options.algorithms]))


def learn(algorithm: str, seed: int, steps: int) -> dict[str, Any]:
    """Rewards of a run, in its steps' order; of one that failed, those it had come to."""
    more = MORE.get(algorithm, [])
    words = more if any(word.startswith("algorithm=") for word in more) else [f"algorithm={algorithm}", *more]
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "moerl", "train", f"recipe={RECIPE}", f"num_steps={steps}", f"seed={seed}", "save_every=0"]
        command += [f"output_dir={directory}", "observe.tensorboard=false", "observe.terminal=false", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
        if done.returncode:
            print(f"{algorithm}, seed {seed}: ended with {done.returncode}: {done.stderr[:500]}", file=sys.stderr)
        rows = [json.loads(line) for line in (Path(directory) / RECIPE / "metrics.jsonl").read_text().splitlines()]
    return {"algorithm": algorithm, "seed": seed, "steps": steps, "rewards": [row["reward/mean"] for row in rows]}


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| algorithm | seeds | reward, last ten steps: median (each) | first step above .6: median |", "|---|---|---|---|"]
    for name in dict.fromkeys(row["algorithm"] for row in rows):
        rewards = [row["rewards"] for row in rows if row["algorithm"] == name]
        last = sorted(statistics.fmean(each[-10:]) for each in rewards)
        first = [next((step for step, reward in enumerate(each, 1) if reward > 0.6), None) for each in rewards]
        reached = sorted(step for step in first if step is not None)
        median = f"{statistics.median(reached):.0f}" if len(reached) == len(first) else f"{len(reached)} of {len(first)} reach it"
        each = ", ".join(f"{value:.2f}" for value in last)
        lines.append(f"| {name} | {len(rewards)} | {statistics.median(last):.2f} ({each}) | {median} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
