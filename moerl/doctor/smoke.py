"""Smoke: two tiny runs on this machine, with the engine and the environments of a recipe (`moerl doctor --smoke`).

They are runs as any other: a push is verified byte by byte, the trainer compares its log-probs with the server's, and a run that cannot go
on says why. What they show is that the two environments work together; not that a large model fits.
"""

import json
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from moerl.config.schema.run_config import RunConfig
from moerl.doctor.checks.findings import Finding, fail, ok, skipped
from moerl.doctor.head import Diagnosis

_START_SECONDS = 1800
"""Engines compile kernels when they start for the first time."""
_SECONDS = 2 * _START_SECONDS
_LINES = 4
"""Lines of what a run says when it ends, in a row of the table."""
_RECIPE = "grpo-tiny-moe-1n2g-sync"
_ALWAYS = (
    "num_steps=2", "save_every=0", "deterministic=false", "observe.terminal=false", "groups_per_step=4", "group_size=4",
    'reward.terms.repeat={kind: format, pattern: ".*[0-9].*"}', "train.layout={ranks: 1, ep: 1}", "train.dtype=bfloat16",
    "model.scratch.hidden_size=256", "model.scratch.head_dim=64", "rollout.max_running=16", "rollout.prefill_chunk=128",
    "weights.mismatch_limit=0.1", f"deadlines.start_seconds={_START_SECONDS}",
)  # fmt: skip
"""Sizes that attention kernels have, and a reward that random completions earn half of the time, so that there is a gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    check: str
    shows: str
    gpus: int
    """GPUs that it takes of a machine that has any."""
    overrides: tuple[str, ...]


TRIALS = (
    Trial(
        check="smoke: trainer and server in turn",
        shows="two steps, buckets by IPC, both sleep and wake",
        gpus=1,
        overrides=("placement.mode=colocated", "train.offload=all", "weights.transport=ipc"),
    ),
    Trial(check="smoke: a GPU each", shows="two steps, buckets by NCCL", gpus=2, overrides=("weights.transport=nccl",)),
)


def with_smoke(diagnosis: Diagnosis, config: RunConfig) -> Diagnosis:
    """The same with what the runs of `config` found here."""
    num_gpus = max((node.torch_gpus for node in diagnosis.nodes if node.hostname == socket.gethostname()), default=0)
    return replace(diagnosis, findings=(*diagnosis.findings, *smoke(config, num_gpus=num_gpus)))


def smoke(config: RunConfig, *, num_gpus: int) -> Iterator[Finding]:
    """One finding for each trial, in their order; each takes a minute or so on CPU, and as long as its engine takes to start.

    `num_gpus`: of this machine, as PyTorch sees them; 0: the runs are on CPU, where memory is shared and gloo is the network.
    """
    for trial in TRIALS:
        if 0 < num_gpus < trial.gpus and config.placement.device != "cpu":
            yield skipped(trial.check, f"takes {trial.gpus} GPUs, and here is {num_gpus}")
        else:
            on_cpu = num_gpus == 0 or config.placement.device == "cpu"
            found = _tried(trial, config)
            yield replace(found, found=f"{'on CPU: ' if on_cpu else ''}{found.found}", node=socket.gethostname())


def _tried(trial: Trial, config: RunConfig) -> Finding:
    overrides = words(trial, config)
    fix = shlex.join(["moerl", "train", *overrides])
    with tempfile.TemporaryDirectory(prefix="moerl-smoke-") as directory:
        command = [sys.executable, "-m", "moerl", "train", *overrides, f"output_dir={directory}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return fail(trial.check, f"did not end within {_SECONDS} s", trial.shows, fix)
        if done.returncode != 0:
            return fail(trial.check, _cause(done.stderr) or f"ended with code {done.returncode}", trial.shows, fix)
        return ok(trial.check, _found(Path(directory)), trial.shows)


def words(trial: Trial, config: RunConfig) -> list[str]:
    """Those of `moerl train`, without a directory: of the recipe's, what decides which environments meet and where they compute."""
    own = [f"rollout.engine={config.rollout.engine}", f"placement.device={config.placement.device}"]
    own += [] if config.rollout.python is None else [f"rollout.python={config.rollout.python}"]
    own.append(f"train.reference_te={str(config.train.reference_te).lower()}")
    return [f"recipe={_RECIPE}", *_ALWAYS, *trial.overrides, *own]


def _cause(errors: str) -> str:
    """The run's own words about why it ended: from its `moerl:` line on, or the last of a traceback."""
    lines = [line for line in errors.splitlines() if line.strip()]
    first = next((number for number, line in enumerate(lines) if line.startswith("moerl: ")), max(len(lines) - 1, 0))
    return " ".join(line.strip() for line in lines[first : first + _LINES]).removeprefix("moerl: ")


def _found(output_dir: Path) -> str:
    row = json.loads((output_dir / _RECIPE / "metrics.jsonl").read_text().splitlines()[-1])
    return (
        f"step {row['time/step']:.1f} s, gradient {row['train/grad_norm']:.2g}, push of {row['push/bytes'] / 1e6:.1f} MB in "
        f"{row['push/seconds']:.2f} s, log-probs differ by {row['mismatch/mean']:.1g}"
    )
