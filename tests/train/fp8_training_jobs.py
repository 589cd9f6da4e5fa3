"""What the ranks of the tests of FP8 and of bfloat16 do; rank 0's value goes to the test."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from checkpoint_jobs import load, save
from engine_jobs import new_engine, train

from moerl.algorithms.mini_batch_loss import loss_of
from moerl.config.algorithm_settings import algorithm
from moerl.train.batching.packed_sequences import pack
from moerl.train.engine_settings import EngineSettings
from moerl.types.batch import TrainBatch


def names_in_fp8(settings: EngineSettings, batch: TrainBatch) -> tuple[set[str], set[str]]:
    """Of all matrices: those multiplied in FP8 in a training step, and the others."""
    from transformer_engine.pytorch import linear

    engine = new_engine(settings)
    of_weight = {id(weight): name for chunk in engine.model.chunks for name, weight in chunk.named_parameters() if weight.ndim > 1}
    seen, upstream = set(), linear.quantized_linear

    def spy(x: Any, weight: Any, chosen: Any) -> Any:
        seen.add(of_weight[id(weight)])
        return upstream(x, weight, chosen)

    linear.quantized_linear = spy
    try:
        engine.update(batch, loss_of(algorithm("grpo")), lr=1e-3, num_updates=1)
    finally:
        linear.quantized_linear = upstream
    return seen, set(of_weight.values()) - seen


def rank_tokens(settings: EngineSettings, batch: TrainBatch) -> tuple[set[int], set[int]]:
    """Tokens of this rank's micro-batches before a column-parallel layer gathers them, and rows of its products."""
    from transformer_engine.pytorch import linear

    engine = new_engine(settings)
    before, products, upstream = set(), set(), linear.quantized_linear
    gather = linear._TensorParallel._before

    def note(self: Any, x: Any) -> Any:
        before.add(x.shape[0])
        return gather(self, x)

    def spy(x: Any, weight: Any, chosen: Any) -> Any:
        products.add(int(np.prod(x.shape[:-1])))
        return upstream(x, weight, chosen)

    linear._TensorParallel._before, linear.quantized_linear = note, spy
    try:
        engine.logprobs(batch)
    finally:
        linear._TensorParallel._before, linear.quantized_linear = gather, upstream
    return before, products


def padded_to(settings: EngineSettings, batch: TrainBatch, multiple: int) -> tuple[np.ndarray, float, float]:
    """Log-probs, loss and gradient norm with every micro-batch padded to a multiple of this."""
    engine = new_engine(settings)
    engine.step.pack = lambda whole, members: pack(whole, members, multiple)
    batch = replace(batch, old_logprobs_T=batch.rollout_logprobs_T)
    logprobs_T = engine.logprobs(batch)
    stats = engine.update(batch, loss_of(algorithm("grpo")), lr=1e-3, num_updates=1)
    return logprobs_T, stats.loss, stats.grad_norm


def train_without_expert_padding(settings: EngineSettings, batch: TrainBatch) -> None:
    import transformer_engine.pytorch as te

    te.Fp8Padding.forward = lambda self, inp, m_splits: (inp, m_splits)
    te.Fp8Unpadding.forward = lambda self, inp, m_splits: inp
    train(settings, batch, 1, 1)


def saved_and_continued(settings: EngineSettings, batch: TrainBatch, directory: Any) -> tuple[list[float], list[float]]:
    """Gradient norms of two steps after a checkpoint: straight on, and in a new engine that loaded it."""
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    def two_steps(engine: Any) -> list[float]:
        return [engine.update(batch, loss_of(algorithm("grpo")), lr=1e-3, num_updates=1).grad_norm for _ in range(2)]

    engine = new_engine(settings)
    two_steps(engine)
    save(engine, directory)
    straight = two_steps(engine)
    FP8GlobalStateManager.reset()
    engine = type(engine)(settings, engine._groups)
    load(engine, directory)
    return straight, two_steps(engine)


def small_updates(settings: EngineSettings, batch: TrainBatch, num_steps: int, lr: float) -> dict[str, float]:
    """What becomes of updates far below a bfloat16 step: shares of all parameters."""
    engine = new_engine(settings)
    parts = list(getattr(engine.optimizer, "chained_optimizers", [engine.optimizer]))

    def masters() -> torch.Tensor:
        return torch.cat([shard.flatten() for part in parts for group in part.shard_fp32_from_float16_groups for shard in group]).clone()

    def rounded() -> torch.Tensor:
        return torch.cat([shard.flatten() for part in parts for group in part.shard_float16_groups for shard in group]).clone()

    start, alone, before = rounded(), rounded(), masters()
    largest = 0.0
    for _ in range(num_steps):
        engine.update(batch, loss_of(algorithm("grpo")), lr=lr, num_updates=1)
        after = masters()
        # The same updates added to parameters that have nothing but bfloat16.
        alone = (alone.float() + (after - before)).bfloat16()
        largest, before = max(largest, float((after - before).abs().max())), after
    moved = before != start.float()
    return {
        "masters_moved": float(moved.float().mean()),
        "parameters_moved": float((rounded() != start).float().mean()),
        "bfloat16_alone_moved": float((alone != start).float().mean()),
        "parameters_are_rounded_masters": float((rounded() == before.bfloat16()).float().mean()),
        "largest_update": largest,
        "is_float32": float(before.dtype == torch.float32),
    }


def accumulated(settings: EngineSettings, batch: TrainBatch) -> dict[str, Any]:
    """Gradients of one mini-batch of single-sequence micro-batches: accumulated, and each alone, added here in float32 and in bfloat16."""
    from moerl.train.loss.batch_loss import Denominators

    engine = new_engine(settings)
    engine.model.config.finalize_model_grads_func = None
    loss = engine.step.loss(loss_of(algorithm("grpo")), Denominators.of(batch))
    micro_batches = [engine.step.pack(batch, [index]) for index in range(batch.num_sequences)]

    def gradients(chosen: list[Any]) -> torch.Tensor:
        for chunk in engine.model.wrapped:
            chunk.zero_grad_buffer()
        engine.step.run(chosen, loss, forward_only=False)
        # Gradients of the output layer, here the embedding too, are float32 sums over chunks before they are added.
        named = (item for chunk in engine.model.chunks for item in chunk.named_parameters())
        return torch.cat([parameter.main_grad.flatten() for name, parameter in named if "embedding" not in name]).clone()

    together = gradients(micro_batches)
    pieces = [gradients([micro]) for micro in micro_batches]
    in_float32, in_bfloat16 = torch.zeros_like(pieces[0]), torch.zeros_like(pieces[0], dtype=torch.bfloat16)
    for piece in pieces:
        in_float32 += piece
        in_bfloat16 += piece.bfloat16()
    return {
        "dtype": str(together.dtype),
        "pieces_fit_bfloat16": all(torch.equal(piece, piece.bfloat16().float()) for piece in pieces),
        "equal": torch.equal(together, in_float32),
        "differ_from_bfloat16": float((together != in_bfloat16.float()).float().mean()),
    }


def reduced_gradients(settings: EngineSettings, batch: TrainBatch, plan: list[list[list[int]]]) -> dict[str, np.ndarray]:
    """What the optimizer sees, of every parameter of rank 0, when the ranks run these micro-batches."""
    engine = new_engine(settings)
    engine.step.plan = lambda _: plan
    found: dict[str, np.ndarray] = {}

    def note() -> None:
        for chunk in engine.model.wrapped:
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                ranks = group.intra_distributed_optimizer_instance_group
                for bucket in group.buckets:
                    shards = bucket.grad_data.chunk(ranks.size())
                    dist.all_gather(list(shards), shards[ranks.rank()].clone(), group=ranks)
        found.update({name: p.main_grad.numpy().copy() for chunk in engine.model.chunks for name, p in chunk.named_parameters()})

    engine.optimizer.step = note
    engine.update(batch, loss_of(algorithm("grpo")), lr=1e-3, num_updates=1)
    return found
