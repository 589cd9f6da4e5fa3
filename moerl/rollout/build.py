"""From the configuration to the run's rollout engines."""

from collections.abc import Callable
from pathlib import Path

from moerl.config.model_shape import read_config, shape_of_config
from moerl.config.schema import RunConfig
from moerl.rollout.commands import native_command, port_of, server_command
from moerl.rollout.engine import RolloutEngine
from moerl.rollout.http_engine import HTTPEngine
from moerl.rollout.limits import Limits


def build_engines(config: RunConfig, model_dir: Path, log_dir: Path) -> list[RolloutEngine]:
    """One engine per server, not yet started. `model_dir`: a Hugging Face checkpoint directory, of which the engines read the
    configuration only: weights come by a push. Servers log to log_dir/rollout-N.log."""
    build = ENGINES[config.rollout.engine]
    return [build(config, model_dir, log_dir, index) for index in range(config.rollout.num_servers)]


def _build_hf(config: RunConfig, model_dir: Path, log_dir: Path, index: int) -> RolloutEngine:
    extra = ["--deterministic"] if config.deterministic else []
    return _engine(server_command(config, model_dir, index, extra=extra, module="moerl.rollout.hf"), config, log_dir, index)


def _build_native(config: RunConfig, model_dir: Path, log_dir: Path, index: int) -> RolloutEngine:
    """In an environment of its own; a server of one node, on this host."""
    return _engine(native_command(config, model_dir, index), config, log_dir, index)


def _engine(command: list[str], config: RunConfig, log_dir: Path, index: int) -> RolloutEngine:
    rollout = config.rollout
    log_path, port = log_dir / f"rollout-{index}.log", port_of(rollout, index)
    return HTTPEngine(command, host=rollout.host, port=port, log_path=log_path, start_seconds=rollout.start_seconds)


def _build_fake(config: RunConfig, model_dir: Path, log_dir: Path, index: int) -> RolloutEngine:
    # torch and transformers are imported for this engine only.
    import torch

    from moerl.rollout.fake import FakeEngine
    from moerl.rollout.hf.model import checkpoint_specs

    model = read_config(model_dir)
    return FakeEngine(
        f"fake-{index}",
        limits=Limits(max_context=config.model.max_context, vocab_size=model["vocab_size"], routes=shape_of_config(model).routes),
        expected=checkpoint_specs(model_dir, getattr(torch, config.rollout_dtype)),
        max_running=config.rollout.max_running,
    )


ENGINES: dict[str, Callable[[RunConfig, Path, Path, int], RolloutEngine]] = {
    "hf": _build_hf,
    "sglang": _build_native,
    "fake": _build_fake,
}
