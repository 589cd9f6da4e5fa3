"""Kill every kind of process of a run, several times each, and measure what docs/reliability.md shows.

python tests/run/kill_series.py --times 3 --seed 1 --out build/kills     every kind, that often
python tests/run/kill_series.py --every 6 --steps 24 --out build/goodput  one run, a kill of a drawn kind after every 6 steps
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from random import Random
from statistics import median

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "suite"))
from whole_runs import (
    DIGIT,
    PROCESSES,
    SYNC,
    assert_all_end,
    checkpoint_tensors,
    rows,
    run,
    start,
    users_environment,
    wait_for_step,
    without_restarts,
    words_of,
)

from moerl.types.exit_codes import ExitCode

STEPS = 8
ENV = users_environment()


def overrides(num_steps: int) -> list[str]:
    return [f"num_steps={num_steps}", "save_every=1", DIGIT]


def kill(family: list[psutil.Process], name: str) -> None:
    matching = sorted((each for each in family if re.search(PROCESSES[name], words_of(each))), key=lambda each: each.create_time())
    matching[1 if name == "fork server of ranks" else 0].kill()


def next_step(process: "subprocess.Popen[str]") -> float:
    """Seconds until the next row of the terminal."""
    begun = time.monotonic()
    while not re.match(r" *[0-9]+/", line := process.stdout.readline()):
        assert line, f"it ended: {process.stderr.read()[-2000:]}"
    return time.monotonic() - begun


def one_kill(name: str, step: int, undisturbed: Path, directory: Path) -> dict[str, object]:
    """What became of a run whose process was killed after `step`: seconds until it ended, and from there until the next new row; steps
    that were made again."""
    process = start(directory, *overrides(STEPS), env=ENV)
    family = wait_for_step(process, step)
    kill(family, name)
    begun = time.monotonic()
    stderr = process.communicate(timeout=180)[1]
    found: dict[str, object] = {"kind": name, "step": step, "code": process.returncode, "ended": time.monotonic() - begun, "said": stderr}
    assert_all_end(family)
    if process.returncode != 0:
        assert process.returncode == ExitCode.KILLED, stderr
        made = len(rows(directory))
        process = start(directory, *overrides(STEPS), env=ENV)
        found["trains"] = next_step(process)
        first = min(rows(directory)[-1]["step"], made + 1)
        process.communicate(timeout=180)
        assert process.returncode == 0
        found["again"] = made + 1 - first
    same = [without_restarts(row) for row in rows(directory)] == [without_restarts(row) for row in rows(undisturbed)]
    return found | {"same": same and checkpoint_tensors(directory / SYNC) == checkpoint_tensors(undisturbed / SYNC)}


def series(times: int, seed: int, out: Path) -> None:
    """Every kind `times` times, one after the other, so that a series that is cut off has seen all."""
    undisturbed = out / "undisturbed"
    if not undisturbed.exists():
        done = run(undisturbed, *overrides(STEPS), env=ENV)
        assert done.returncode == 0, done.stderr
    log = out / "kills.jsonl"
    done_before = len(log.read_text().splitlines()) if log.exists() else 0
    cases = [(name, 1 + Random(f"{seed} {turn} {name}").randrange(STEPS - 2)) for turn in range(times) for name in PROCESSES]
    for name, step in cases[done_before:]:
        directory = out / "disturbed"
        shutil.rmtree(directory, ignore_errors=True)
        found = one_kill(name, step, undisturbed, directory)
        with log.open("a") as file:
            file.write(json.dumps(found) + "\n")
    print_table([json.loads(line) for line in log.read_text().splitlines()])


def print_table(found: list[dict[str, float]]) -> None:
    by_kind = defaultdict(list)
    for each in found:
        by_kind[each["kind"]].append(each)
    print("| killed | times | ended with 76 | until it ended | until it trains | steps again | same bits |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for kind, cases in by_kind.items():
        ended = [each for each in cases if each["code"] != 0]
        columns = [_seconds([each[name] for each in ended]) for name in ("ended", "trains")]
        again = max((each["again"] for each in ended), default="-")
        print(f"| {kind} | {len(cases)} | {len(ended)} | {' | '.join(columns)} | {again} | {sum(each['same'] for each in cases)} |")


def _seconds(values: list[float]) -> str:
    return f"{median(values):.0f} s, {max(values):.0f} s" if values else "-"


def goodput(every: int, num_steps: int, seed: int, out: Path) -> None:
    """One run with a kill after every so many new steps, started again until it is finished, beside one that nothing disturbs."""
    begun = time.monotonic()
    assert run(out / "undisturbed", *overrides(num_steps), env=ENV, seconds=600).returncode == 0
    alone, random, kills, begun = time.monotonic() - begun, Random(seed), [], time.monotonic()
    while True:
        made = len(rows(out / "killed")) if (out / "killed" / SYNC / "metrics.jsonl").exists() else 0
        process = start(out / "killed", *overrides(num_steps), env=ENV)
        while made + every < num_steps and process.poll() is None:
            made += every
            if not any(line.strip().startswith(f"{made}/") for line in process.stdout):
                break  # it has ended
            kills.append(random.choice(list(PROCESSES)))
            kill(psutil.Process(process.pid).children(recursive=True), kills[-1])
        process.communicate(timeout=600)
        if process.returncode == 0:
            break
    wall = time.monotonic() - begun
    seconds = [row["time/step"] for row in map(json.loads, (out / "killed" / SYNC / "metrics.jsonl").read_text().splitlines())]
    same = checkpoint_tensors(out / "killed" / SYNC) == checkpoint_tensors(out / "undisturbed" / SYNC)
    print(f"{num_steps} steps, {len(kills)} kills ({', '.join(kills)}), same bits: {same}")
    print(f"undisturbed {alone:.0f} s; killed {wall:.0f} s, {sum(seconds):.0f} s of them in steps that count")
    print(f"a kill cost {(wall - alone) / len(kills):.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--every", type=int, help="steps between kills: measures goodput")
    parser.add_argument("--steps", type=int, default=24)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.every:
        goodput(arguments.every, arguments.steps, arguments.seed, arguments.out)
    else:
        series(arguments.times, arguments.seed, arguments.out)


if __name__ == "__main__":
    main()
