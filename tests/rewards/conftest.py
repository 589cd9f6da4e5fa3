from collections.abc import Callable
from pathlib import Path

import pytest

from moerl.config.schema.data_config import Isolation, RewardConfig, RewardTerm

FUNCTIONS = r"""
import os, subprocess, sys, time
import numpy

def length(data_source, solution_str, ground_truth, extra_info):
    return len(solution_str)

def pause(data_source, solution_str, ground_truth, extra_info):
    time.sleep(0.5)
    return 1.0

def wide(data_source, solution_str, ground_truth, extra_info):
    return {"score": len(solution_str), **{f"number {i}": 0.5 for i in range(20000)}}

kept = []

def leak(data_source, solution_str, ground_truth, extra_info):
    kept.append(bytearray(60 * 2**20))
    return len(kept)

def name(data_source, solution_str, ground_truth, extra_info):
    return {"score": 1.0, **{f"{solution_str} {i}": float(i) for i in range(200)}}

def freeze(data_source, solution_str, ground_truth, extra_info):
    import ctypes, threading
    if solution_str == "freeze":  # a thread that keeps the interpreter, once the answer has left
        threading.Thread(target=lambda: (time.sleep(0.3), ctypes.PyDLL(None).sleep(600)), daemon=True).start()
    return 1.0

def allocate(data_source, solution_str, ground_truth, extra_info):
    return len(bytearray(extra_info["num_bytes"]))

def seen(data_source, solution_str, ground_truth, extra_info):
    return {"score": 0.25, "length": len(solution_str), "index": extra_info["index"], "same": solution_str == ground_truth,
            "source": data_source, "numpy": numpy.float32(2.5), "lost": float("nan"), "array": numpy.array([1, 0]), "huge": 10**400}

def misbehave(data_source, solution_str, ground_truth, extra_info):
    print("a print must not disturb the answers", flush=True)
    if extra_info.get("announce"):
        escaped = subprocess.Popen(["sleep", "600"], start_new_session=True)
        for pid in (os.getpid(), escaped.pid):
            open(os.path.join(extra_info["announce"], str(pid)), "x").close()
    if solution_str == "raise":
        raise KeyError("no such answer")
    if solution_str == "mute":
        class Mute(Exception):
            def __str__(self):
                raise TypeError("no text")
        raise Mute
    if solution_str == "half":
        raise ValueError("no field " + chr(0xD83D))
    if solution_str == "exit":
        sys.exit(3)
    if solution_str == "die":
        os.kill(os.getpid(), 9)
    if solution_str == "die once" and not os.path.exists(ground_truth):
        open(ground_truth, "x").close()
        os.kill(os.getpid(), 9)
    if solution_str == "sleep":
        time.sleep(600)
    if solution_str == "spin":
        return 9 ** 9 ** 9 > 0
    if solution_str == "memory":
        return len(bytearray(2 ** 40))
    if solution_str == "child":
        child = subprocess.Popen(["sleep", "600"])
        with open(ground_truth, "w") as file:
            file.write(str(child.pid))
        child.wait()
    return {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "1.0", "list": [1.0], "dict": {"value": 1.0},
            "scalar": numpy.int64(3), "bool": True, "array": numpy.array([1, 0]), "huge": 10**400}.get(solution_str, 1.0)
"""


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    """A file of reward functions that do their worst."""
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    return file


@pytest.fixture
def misbehaving(functions: Path) -> Callable[..., RewardConfig]:
    """One term that does what the response says."""

    def config(isolation: Isolation = "strict", **settings: float) -> RewardConfig:
        term = RewardTerm(kind="function", path=f"{functions}:misbehave", isolation=isolation)
        return RewardConfig(terms={"bad": term}, **settings)

    return config
