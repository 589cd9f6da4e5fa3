"""The rules of rollout.engine=vllm and sglang: their environments, their arguments by name, the models they are tested with."""

import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from moerl.config.model_config import model_config
from moerl.config.model_shape import ModelShape
from moerl.config.problems import can_be, problem
from moerl.types import Problem

if TYPE_CHECKING:
    from moerl.config.schema import RolloutConfig, RunConfig

FAMILIES = {"sglang": ("qwen3", "qwen3_moe", "deepseek_v3"), "vllm": ("qwen3", "qwen3_moe", "deepseek_v3")}
"""Of engines with an environment of their own: the model_types whose log-probs and pushes are tested."""

CHECK_SECONDS = 120.0
"""For importing an engine and its argument parser; it takes about 5 s."""

_CHECKOUT = Path(__file__).parents[2]
_PROBLEMS = TypeAdapter(list[Problem])


def interpreter(rollout: "RolloutConfig") -> str:
    """What the servers are started with."""
    if rollout.python is not None:
        return rollout.python
    return str(_own_environment(rollout.engine)) if rollout.engine in FAMILIES else sys.executable


def engine_problems(config: "RunConfig", shape: ModelShape | None) -> Iterator[Problem]:
    """Every rule it breaks, for a model of `shape` if it is known. Asks the engine's environment, some seconds: about its version, its
    arguments, and the model's sizes.

    A model that is only named (model.published without a path) cannot be started, and a login node that checks its recipe needs no
    environment: what belongs to starting is asked for with model.path, or listed by `moerl check` (`unserved`).
    """
    rollout = config.rollout
    if rollout.engine not in FAMILIES:
        if rollout.engine_args:
            reason = f"rollout.engine={rollout.engine} has no arguments of its own"
            yield problem(
                "rollout.engine_args", rollout.engine_args, "has no effect", reason, "rollout.engine=vllm or sglang, or leave it out"
            )
        return
    if config.deterministic:
        reason = f"{rollout.engine}'s results depend on which requests share a batch"
        yield problem("deterministic", True, f"cannot be kept by rollout.engine={rollout.engine}", reason, "rollout.engine=hf")
    if config.model.is_only_named:
        return
    yield from unserved(rollout, shape)
    python = Path(interpreter(rollout))
    if can_be(python) and python.is_file():
        model = model_config(config.model) if shape is not None and shape.model_type in FAMILIES[rollout.engine] else None
        yield from _found_there(str(python), rollout.engine, json.dumps(rollout.engine_args, sort_keys=True), json.dumps(model))
    elif rollout.python is None:  # one that is given and missing is another rule's
        rule = f"needs an environment for rollout.engine={rollout.engine}; there is none at {python.parents[1]}"
        reason = "engines pin packages that a trainer's environment cannot have"
        yield problem("rollout.python", None, rule, reason, f"make engines ENGINES={rollout.engine}, or rollout.python=/path/to/its/python")


def unserved(rollout: "RolloutConfig", shape: ModelShape | None) -> Iterator[Problem]:
    """Why the engine cannot serve a model of `shape`, whose checkpoint need not be there."""
    families = FAMILIES.get(rollout.engine)
    if families is not None and shape is not None and shape.model_type not in families:
        rule = f"serves {', '.join(families)}; the model is {shape.model_type}"
        reason = "whether every pushed byte arrives in the engine's own layout is tested for these only"
        yield problem("rollout.engine", rollout.engine, rule, reason, "rollout.engine=hf, or fake to exercise the trainer")


def _own_environment(engine: str) -> Path:
    return _CHECKOUT / f".venv-{engine}" / "bin" / "python"


@functools.cache
def _found_there(python: str, engine: str, arguments: str, model: str) -> tuple[Problem, ...]:
    """By the engine's own parser, in its environment; nothing is started. `arguments` and `model` (or null) are JSON."""
    command = [python, "-m", f"moerl.rollout.{engine}.server", "--check", "--engine-args", arguments, "--model-config", model]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_SECONDS, check=True)
        return tuple(_PROBLEMS.validate_json(ended.stdout))
    except subprocess.CalledProcessError as error:
        reason = "it ended with " + "\n".join(error.stderr.splitlines()[-3:])
    except (OSError, subprocess.TimeoutExpired, ValidationError) as error:
        reason = str(error)
    fix = f"make engines ENGINES={engine}, or install moerl there: {python} -m pip install --no-deps moerl"
    return (problem("rollout.python", python, f"cannot start moerl.rollout.{engine}", reason, fix),)
