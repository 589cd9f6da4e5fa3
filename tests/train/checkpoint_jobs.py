"""What the ranks of a checkpoint's tests do. Every function runs on every rank; rank 0's value goes to the test."""

import io
import os
import pickle
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from engine_jobs import new_engine

from moerl.algorithms.mini_batch_loss import loss_of
from moerl.config.algorithm_settings import algorithm
from moerl.train.checkpoint.checkpoint_dirs import HEAD, FileDigests, digest_files
from moerl.train.engine_settings import EngineSettings
from moerl.types.batch import TrainBatch
from moerl.types.errors import CheckpointError
from moerl.types.stats import StepStats


@dataclass(frozen=True, kw_only=True)
class Continued:
    steps: list[StepStats]
    logprobs_T: np.ndarray
    weights: dict[str, np.ndarray]
    """Exported at the end."""


def save(engine: Any, directory: Path, *, copies: bool = True) -> list[Any]:
    """As the driver and the ranks do together; every rank's WrittenShards on rank 0."""
    engine.shards.stage(copies=copies)
    return write(engine, directory)


def write(engine: Any, directory: Path) -> list[Any]:
    written: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(written, engine.shards.writer.write(directory))
    if dist.get_rank() == 0:
        engine.shards.writer.finish(directory, [share.index for share in written])
    dist.barrier()
    return written


def load(engine: Any, directory: Path, **options: Any) -> None:
    assert engine.shards.load(directory, files_in(directory), **options) == []


def files_in(directory: Path) -> FileDigests:
    """With the digests that they have; a run takes those of the manifest."""
    return digest_files(directory, [*HEAD, *sorted(path.name for path in directory.glob("*.distcp"))])


def save_and_continue(settings: EngineSettings, batch: TrainBatch, directory: Path) -> tuple[Continued, Continued, list[Any]]:
    """Two steps after a checkpoint: straight on, and again in the same engine from the checkpoint; and what each rank wrote."""
    engine = new_engine(settings)
    engine.update(batch, loss_of(algorithm("grpo")), lr=1e-3, num_updates=2)
    engine.shards.stage(copies=True)
    straight = two_steps(engine, batch)
    written = write(engine, directory)  # of the weights before those steps
    load(engine, directory)
    return straight, two_steps(engine, batch), written


def moments_around_staging(settings: EngineSettings, batch: TrainBatch) -> list[tuple[float, float]]:
    """By rank, a sum of the first moments before and after a checkpoint is staged."""
    engine = new_engine(settings)
    engine.update(batch, loss_of(algorithm("grpo")), lr=1e-3, num_updates=2)
    mine = [_sum_of_moments(engine)]
    engine.shards.stage(copies=True)
    mine.append(_sum_of_moments(engine))
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, tuple(mine))
    return found


def _sum_of_moments(engine: Any) -> float:
    states = [state["exp_avg"] for each in engine.optimizer.chained_optimizers for state in each.optimizer.state.values()]
    return sum(float(state.abs().sum()) for state in states)


def save_refused(settings: EngineSettings, refused: TrainBatch, batch: TrainBatch, directory: Path) -> Continued:
    """Two steps after a checkpoint of an optimizer that has taken no step, because the first update was not applied."""
    engine = new_engine(settings)
    engine.update(refused, loss_of(algorithm("grpo")), lr=1e-3, num_updates=1)
    save(engine, directory)
    return two_steps(engine, batch)


def load_and_continue(settings: EngineSettings, batch: TrainBatch, directory: Path) -> Continued:
    """The same two steps in a new engine."""
    engine = new_engine(settings)
    load(engine, directory)
    return two_steps(engine, batch)


def save_and_score(settings: EngineSettings, batch: TrainBatch, directory: Path) -> np.ndarray:
    """Log-probs after an update, of weights that were then saved."""
    engine = new_engine(settings)
    engine.update(batch, loss_of(algorithm("grpo")), lr=1e-3, num_updates=2)
    save(engine, directory)
    return engine.logprobs(batch)


def load_and_score(settings: EngineSettings, batch: TrainBatch, directory: Path) -> tuple[np.ndarray, np.ndarray, dict[str, int]]:
    """Log-probs before and after loading, and the bytes that the rank then holds of each kind."""
    engine = new_engine(settings)
    before_T = engine.logprobs(batch)
    engine.load(directory, files_in(directory))
    return before_T, engine.logprobs(batch), {kind: held.device + held.host for kind, held in engine._memory.bytes().items()}


def two_steps(engine: Any, batch: TrainBatch) -> Continued:
    steps = [engine.update(batch, loss_of(algorithm("grpo")), lr=1e-3, num_updates=1) for _ in range(2)]
    weights = {name: tensor.double().numpy() for name, tensor in engine.export()}
    return Continued(steps=steps, logprobs_T=engine.logprobs(batch), weights=weights)


def save_once(settings: EngineSettings, batch: TrainBatch, directory: Path, copies: bool = True) -> list[Any]:
    """What each rank wrote, after one step."""
    engine = new_engine(settings)
    engine.update(batch, loss_of(algorithm("grpo")), lr=1e-3, num_updates=1)
    return save(engine, directory, copies=copies)


def load_and_save(settings: EngineSettings, before: Path, after: Path) -> None:
    engine = new_engine(settings)
    load(engine, before)
    save(engine, after)


def staged_and_held(settings: EngineSettings, batch: TrainBatch, directory: Path) -> list[tuple[int, int, int]]:
    """By rank, in bytes: what a checkpoint stages; the moments of the rank's optimizer; its weights."""
    engine = new_engine(settings)
    engine.update(batch, loss_of(algorithm("grpo")), lr=1e-3, num_updates=1)
    staged = engine.shards.stage(copies=True)
    moments = [tensor for each in engine.optimizer.chained_optimizers for state in each.state.values() for tensor in state.values()]
    weights = [weight for chunk in engine.model.chunks for weight in chunk.parameters()]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (staged, *(sum(t.numel() * t.element_size() for t in tensors) for tensors in (moments, weights))))
    return every


class Runs:
    """Unpickled by a plain unpickler, it makes a file."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def refused_loads(settings: EngineSettings, batch: TrainBatch, directory: Path, mark: Path) -> dict[str, str]:
    """What loading says of a checkpoint whose named part runs a command when it is unpickled."""
    engine = new_engine(settings)
    engine.update(batch, loss_of(algorithm("grpo")), lr=1e-3, num_updates=1)
    directory.mkdir()
    save(engine, directory)
    said = {}
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # as somebody may have, for programs of their own
    try:
        for part in (".metadata", "common.pt", "rng", "_extra_state"):
            evil = directory.with_name(f"evil-{part}")
            shutil.copytree(directory, evil)
            _spoil(evil, part, Runs(mark))
            for reader, evaluates in (("", False), (" of an evaluation", True)) if part == "_extra_state" else (("", False),):
                try:
                    load(engine, evil, weights_only=evaluates)
                except CheckpointError as error:
                    said[part + reader] = str(error)
    finally:
        del os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"]
    return said


def _spoil(directory: Path, part: str, runs: Runs) -> None:
    if part == ".metadata":
        (directory / part).write_bytes(pickle.dumps(runs))
    elif part == "common.pt":
        torch.save({"optimizer_steps": runs}, directory / part)
    else:
        _spoil_object(directory, part, runs)


def _spoil_object(directory: Path, part: str, runs: Runs) -> None:
    """Objects lie in shards, wherever the index says."""
    index = pickle.loads((directory / ".metadata").read_bytes())
    pickled = torch.frombuffer(bytearray(pickle.dumps(runs)), dtype=torch.uint8)
    buffer = io.BytesIO()
    torch.save([runs if part == "rng" else pickled], buffer)
    for key, place in index.storage_data.items():
        if part in key.fqn:
            shard = directory / place.relative_path
            place.offset, place.length = shard.stat().st_size, len(buffer.getvalue())
            with shard.open("ab") as file:
                file.write(buffer.getvalue())
    (directory / ".metadata").write_bytes(pickle.dumps(index))


def load_of_another_device(settings: EngineSettings, batch: TrainBatch, directory: Path) -> tuple[Continued, Continued]:
    """Straight on from a checkpoint, and from it with the state of random numbers that a GPU has, 16 bytes."""
    engine, own = new_engine(settings), torch.cuda.get_rng_state
    engine.update(batch, loss_of(algorithm("grpo")), lr=1e-3, num_updates=2)
    torch.cuda.get_rng_state = lambda device="cuda": torch.zeros(16, dtype=torch.uint8)  # type: ignore[assignment]
    engine.shards.stage(copies=True)
    torch.cuda.get_rng_state = own
    straight = two_steps(engine, batch)
    write(engine, directory)
    load(engine, directory)
    return straight, two_steps(engine, batch)
