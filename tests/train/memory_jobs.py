"""What the ranks of the memory tests do. Every function runs on every rank; rank 0's value goes to the test."""

import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from checkpoint_jobs import files_in, write
from engine_jobs import Trained, new_engine

from moerl.algorithms.mini_batch_loss import loss_of
from moerl.config.algorithm_settings import algorithm
from moerl.train.engine_settings import EngineSettings
from moerl.types.batch import TrainBatch
from moerl.types.stats import MemoryStats, StepStats


def with_train(settings: EngineSettings, **changes: Any) -> EngineSettings:
    return replace(settings, train=replace(settings.train, **changes))


def train_in_phases(settings: EngineSettings, batch: TrainBatch, sleeps: bool, num_steps: int = 2) -> Trained:
    """The phases of RL steps: old and reference log-probs, update, export, each after a sleep if `sleeps`."""
    engine = new_engine(settings)
    objective = loss_of(algorithm("grpo", "kl_coefficient=0.1"))

    def doze_if_told() -> None:
        if sleeps:
            doze(engine)

    before_T, steps = engine.logprobs(batch), []
    for _ in range(num_steps):
        doze_if_told()
        batch = replace(batch, old_logprobs_T=engine.logprobs(batch), reference_logprobs_T=engine.reference_logprobs(batch))
        doze_if_told()
        steps.append(engine.update(batch, objective, lr=1e-3, num_updates=2))
        doze_if_told()
        weights = {name: tensor.float().numpy() for name, tensor in engine.export()}
    doze_if_told()
    return Trained(
        before_T=before_T, after_T=engine.logprobs(batch), reference_T=engine.reference_logprobs(batch), steps=steps, weights=weights
    )


def save_and_continue(settings: EngineSettings, batch: TrainBatch, directory: Path, sleeps: bool) -> tuple[Any, Any]:
    """Two steps after a checkpoint: straight on while it is not yet written, and again from it. Each after a sleep if `sleeps`."""
    engine = new_engine(settings)
    engine.update(batch, loss_of(algorithm("grpo")), lr=1e-3, num_updates=2)
    if sleeps:
        doze(engine)
    engine.stage(copies=True)
    straight = _two_steps(engine, batch, sleeps)
    write(engine, directory)
    engine.load(directory, files_in(directory))
    return straight, _two_steps(engine, batch, sleeps)


def load_and_continue(settings: EngineSettings, batch: TrainBatch, directory: Path) -> Any:
    """The same two steps in a new engine."""
    engine = new_engine(settings)
    engine.load(directory, files_in(directory))
    return _two_steps(engine, batch, sleeps=False)


def _two_steps(engine: Any, batch: TrainBatch, sleeps: bool) -> tuple[list[StepStats], np.ndarray]:
    if sleeps:
        doze(engine)
    steps = [engine.update(batch, loss_of(algorithm("grpo")), lr=1e-3, num_updates=1) for _ in range(2)]
    return steps, engine.logprobs(batch)


def save_in_place(settings: EngineSettings, batch: TrainBatch, directory: Path) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs before and after a checkpoint that is written from the device's own memory, and a sleep."""
    engine = new_engine(settings)
    engine.update(batch, loss_of(algorithm("grpo")), lr=1e-3, num_updates=1)
    before_T = engine.logprobs(batch)
    engine.stage(copies=False)
    write(engine, directory)
    doze(engine)
    return before_T, engine.logprobs(batch)


def doze(engine: Any) -> None:
    engine.sleep()
    engine.wake()


def fp8_copies_by_state(settings: EngineSettings, batch: TrainBatch) -> list[tuple[str, bool]]:
    """State, and whether a module still has copies of its weights, made before by the last call, as Transformer Engine makes them."""
    engine, found = new_engine(settings), []
    module = next(each for each in engine.model.chunks[0].modules() if hasattr(each, "weight"))

    def note(call: Any) -> None:
        module._fp8_workspaces = {"weight": torch.ones(3)}
        call()
        found.append((engine._memory_states.state, bool(module._fp8_workspaces)))

    note(lambda: engine.update(batch, loss_of(algorithm("grpo")), lr=1e-3, num_updates=1))
    note(engine.shed)
    note(lambda: engine.logprobs(batch))
    note(engine.sleep)
    return found


def bytes_by_state(settings: EngineSettings, batch: TrainBatch) -> tuple[MemoryStats, dict[str, int], dict[str, int]]:
    """Statistics of the second step; storage bytes the optimizer, the parameters and the gradients have awake and asleep."""
    engine = new_engine(settings)

    def sizes() -> dict[str, int]:
        parameters = [parameter for chunk in engine.model.chunks for parameter in chunk.parameters()]
        inner = [chained.optimizer for chained in engine.optimizer.chained_optimizers]
        moments = [value for one in inner for state in one.state.values() for value in state.values()]
        return {
            "parameters": _storage_bytes(parameters),
            "gradients": _storage_bytes([parameter.main_grad for parameter in parameters]),
            "moments": _storage_bytes(moments),
            "reference": _storage_bytes(engine._reference if engine._reference is not None else []),
        }

    for _ in range(2):
        engine.logprobs(batch)
        stats = engine.update(batch, loss_of(algorithm("grpo")), lr=1e-3, num_updates=1)
        awake = sizes()
        engine.sleep()
        asleep = sizes()
        engine.wake()
    return stats.memory, awake, asleep


def _storage_bytes(tensors: list[torch.Tensor]) -> int:
    return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def call_asleep(settings: EngineSettings, batch: TrainBatch) -> dict[str, str]:
    """What every verb says to a trainer that sleeps, and one that sleeps or trains during an export."""
    from moerl.types.errors import ResidencyError

    engine = new_engine(settings)

    def refusal(call: Any) -> str:
        try:
            call()
        except ResidencyError as error:
            return str(error)
        return "accepted"

    said = {"wake awake": refusal(engine.wake)}
    exporting = engine.export()
    if dist.get_rank() == 0:
        next(exporting)
        said["sleep exporting"] = refusal(engine.sleep)
        said["update exporting"] = refusal(lambda: engine.update(batch, loss_of(algorithm("grpo")), lr=1e-3, num_updates=1))
    list(exporting)
    engine.sleep()
    said |= {
        "sleep": refusal(engine.sleep),
        "logprobs": refusal(lambda: engine.logprobs(batch)),
        "update": refusal(lambda: engine.update(batch, loss_of(algorithm("grpo")), lr=1e-3, num_updates=1)),
        "export": refusal(lambda: list(engine.export())),
        "save": refusal(lambda: engine.stage(copies=True)),
        "load": refusal(lambda: engine.load(Path("unused"), {})),
    }
    engine.wake()
    said["logprobs awake"] = refusal(lambda: engine.logprobs(batch))
    return said


def update_asleep(settings: EngineSettings, batch: TrainBatch) -> None:
    engine = new_engine(settings)
    engine.sleep()
    engine.update(batch, loss_of(algorithm("grpo")), lr=1e-3, num_updates=1)


def groups_asleep(settings: EngineSettings) -> tuple[int, int, int, str]:
    """Real groups torch knows awake, asleep and awake again; what a collective says that is called asleep."""
    from megatron.core import parallel_state

    from moerl.train.megatron.process_groups import ReloadableGroup
    from moerl.types.errors import ResidencyError

    engine = new_engine(settings)
    world = torch.distributed.distributed_c10d._world

    def count() -> int:
        return sum(not isinstance(group, ReloadableGroup) for group in world.pg_map)

    group = parallel_state.get_tensor_model_parallel_group()
    ended, awake = weakref.ref(group.real), count()
    engine.sleep()
    asleep, said = count(), ""
    assert ended() is None, "somebody still holds the ended group, and with it its communicator"
    try:
        dist.all_reduce(torch.zeros(1), group=group)
    except ResidencyError as error:
        said = str(error)
    engine.wake()
    dist.all_reduce(torch.zeros(1), group=group)
    return awake, asleep, count(), said


def saved_bytes_and_forwards(settings: EngineSettings, batch: TrainBatch) -> tuple[int, Counter[str]]:
    """Bytes that autograd keeps of the model at the end of the forward pass of one micro-batch; forward passes of some modules."""
    engine = new_engine(with_train(settings, micro_batch_tokens=4096))
    kept: list[torch.Tensor] = []
    answers: list[int] = []
    counts: Counter[str] = Counter()
    for chunk in engine.model.chunks:
        for module in chunk.modules():
            kind = type(module).__name__
            module.register_forward_hook(lambda *_, kind=kind: counts.update([kind]))
    parameters = {p.untyped_storage()._cdata for chunk in engine.model.chunks for p in chunk.parameters()}
    token_logprobs = engine.step.token_logprobs

    def measure_first(*args: Any, **options: Any) -> Any:
        if not answers:
            answers.append(_storage_bytes([tensor for tensor in kept if tensor.untyped_storage()._cdata not in parameters]))
        return token_logprobs(*args, **options)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    engine.step.token_logprobs = measure_first
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        engine.update(batch, loss_of(algorithm("grpo")), lr=1e-3, num_updates=1)
    return answers[0], counts


def equal(first: Trained, second: Trained) -> None:
    """Bit by bit."""
    assert first.steps == second.steps
    np.testing.assert_array_equal(first.before_T, second.before_T)
    np.testing.assert_array_equal(first.after_T, second.after_T)
    np.testing.assert_array_equal(first.reference_T, second.reference_T)
    assert first.weights.keys() == second.weights.keys()
    for name, weight in first.weights.items():
        np.testing.assert_array_equal(weight, second.weights[name], err_msg=name)


def buckets(settings: EngineSettings) -> int:
    """Bucket groups of the dense parameters, each reduced or gathered by itself."""
    return len(new_engine(settings).model.wrapped[0].bucket_groups)


def optimizer_arguments(train: Any) -> dict[str, Any]:
    from moerl.train.optimizer.optimizer import optimizer_config

    return vars(optimizer_config(train))


def adam_against_torch() -> float:
    """Largest difference after some steps with weight decay."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    generator = torch.Generator().manual_seed(0)
    mine = [torch.randn(5, 3, generator=generator), torch.randn(4, generator=generator)]
    theirs = [tensor.clone() for tensor in mine]
    options = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1}
    optimizers = FusedAdam(mine, **options), torch.optim.AdamW(theirs, **options)
    for _ in range(4):
        for own, other in zip(mine, theirs, strict=True):
            own.grad = other.grad = torch.randn(own.shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step()
    return max(float((own - other).abs().max()) for own, other in zip(mine, theirs, strict=True))
