"""What the ranks of the families' tests do: many tiny models, one after the other, in one set of processes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from moerl.algorithms.mini_batch_loss import loss_of
from moerl.config.algorithm_settings import algorithm
from moerl.train.engine_settings import EngineSettings
from moerl.types.batch import TrainBatch
from moerl.types.push import TensorSpec
from moerl.types.stats import StepStats
from moerl.weights.plan.buckets import stored_specs
from moerl.weights.plan.run_plan import plan_deliveries
from moerl.weights.plan.spec_tensors import box_of


@dataclass(frozen=True, kw_only=True)
class Proof:
    packed: list[np.ndarray]
    """Logits [length, vocabulary] of each sequence, several in a row. None under context parallelism, which cuts sequences."""
    padded: list[np.ndarray]
    """The same, each in a row of its own, padded to the longest."""
    wrong_names: list[str]
    """Tensors that the export lacks, adds or changes."""
    wrong_pieces: list[str]
    """Pieces that a rank would send in a push and that are not the checkpoint's, with the rank; tensors whose pieces are not all of it."""
    pushed: list[TensorSpec]
    """What a push would bring."""
    stats: StepStats
    """Of one update."""


def prove(chosen: Sequence[EngineSettings], batch: TrainBatch) -> list[Proof]:
    """Of several models under one layout."""
    from moerl.train.megatron.process_groups import initialize_groups
    from moerl.train.megatron_engine import MegatronEngine

    initialize_groups(chosen[0].train.layout, 1)
    proofs = []
    for settings in chosen:
        engine = MegatronEngine(settings)
        is_cut = settings.train.layout.cp > 1
        packed, padded = ([], []) if is_cut else (packed_logits(engine, batch), _padded_logits(engine, batch))
        wrong, pieces, pushed = wrong_names(engine, settings), wrong_pieces(engine, settings), engine.pushed.specs()
        stats = engine.update(batch, loss_of(algorithm("grpo")), lr=1e-3, num_updates=1)
        proofs.append(Proof(packed=packed, padded=padded, wrong_names=wrong, wrong_pieces=pieces, pushed=pushed, stats=stats))
    return proofs


def packed_logits(engine: Any, batch: TrainBatch) -> list[np.ndarray]:
    share = engine.step.share(batch, engine.step.plan(batch))
    micro_batches = engine.step.micro_batches(share)
    outputs = engine.step.run(micro_batches, partial(_keep, engine.model.vocab_size), forward_only=True)
    found = {}
    for micro, out in zip(micro_batches, outputs, strict=bool(outputs)):
        # What follows the members is padding.
        for member, (start, end) in zip(micro.members, pairwise(micro.cu_seqlens.tolist()), strict=False):
            assert end - start == share.batch.lengths[member]
            found[int(share.sequences[member])] = out["logits"][0, start:end]
    return _of_all_ranks(found, batch.num_sequences)


def _padded_logits(engine: Any, batch: TrainBatch) -> list[np.ndarray]:
    """Megatron's model as pre-training calls it: [sequences, positions], causal, without bounds. Every data-parallel rank runs all."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    multiple = engine._train.layout.tp
    longest = -(-int(batch.lengths.max()) // multiple) * multiple
    tokens = torch.zeros(batch.num_sequences, longest, dtype=torch.int64)
    for row, (start, end) in zip(tokens, pairwise(batch.offsets.tolist()), strict=True):
        row[: end - start] = torch.from_numpy(batch.token_ids_T[start:end])
    with torch.no_grad():
        outputs = get_forward_backward_func()(
            forward_step_func=partial(_forward_padded, engine.model.vocab_size),
            data_iterator=iter([tokens]),
            model=engine.model.wrapped,
            num_microbatches=1,
            seq_length=1,
            micro_batch_size=1,
            forward_only=True,
        )
    found = {row: out["logits"][row, :length] for out in outputs for row, length in enumerate(batch.lengths.tolist())}
    return _of_all_ranks(found, batch.num_sequences)


def _forward_padded(vocab_size: int, iterator: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    tokens = next(iterator)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return model(tokens, positions, None), partial(_keep, vocab_size, None, rows=len(tokens))


def _keep(vocab_size: int, micro: object, outputs: Any, rows: int = 1) -> tuple[torch.Tensor, torch.Tensor, dict[str, np.ndarray]]:
    from megatron.core import parallel_state

    group, head = parallel_state.get_tensor_model_parallel_group(), outputs[0]
    logits = torch.nn.functional.linear(head.hidden_TH, head.weight_VH).unflatten(0, (rows, -1))
    parts = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(parts, logits.contiguous(), group=group)
    whole = torch.cat(parts, dim=-1)[..., :vocab_size]
    return logits.sum(), torch.zeros((), dtype=torch.int), {"logits": whole.numpy()}


def _of_all_ranks(found: dict[int, np.ndarray], count: int) -> list[np.ndarray]:
    everywhere: list[dict[int, np.ndarray]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, found)
    merged = {index: logits for part in everywhere for index, logits in part.items()}
    return [merged[index] for index in range(count)]


def wrong_names(engine: Any, settings: EngineSettings) -> list[str]:
    exported = dict(engine.export())
    if dist.get_rank() != 0:
        return []
    original = load_file(settings.model_dir / "model.safetensors")
    both = original.keys() & exported.keys()
    changed = {name for name in both if exported[name].dtype != original[name].dtype or not exported[name].equal(original[name])}
    return sorted((original.keys() ^ exported.keys()) | changed)


def wrong_pieces(engine: Any, settings: EngineSettings) -> list[str]:
    """Every rank compares what it would send to a server of one process."""
    outline = engine.pushed.outline(bucket_bytes=3000)
    specs = {spec.name: spec for spec in stored_specs(outline.tensors)}
    found = plan_deliveries(outline, {"server": (tuple(specs),)})
    original, rank = load_file(settings.model_dir / "model.safetensors"), dist.get_rank()
    entries = [entry for bucket in found.jobs.get(rank, ()) for entry in bucket.entries]
    pieces = [(entry, engine.pushed.read(entry.name, entry.start, entry.shape)) for entry in entries]
    wrong = [f"{e.name} of {rank}" for e, piece in pieces if not piece.equal(box_of(original[e.name], e.start, e.shape))]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (wrong, [(entry.name, prod(entry.shape)) for entry in entries]))
    sizes = dict.fromkeys(specs, 0)
    for _, mine in everywhere:
        for name, size in mine:
            sizes[name] += size
    return [*(name for names, _ in everywhere for name in names), *(name for name in specs if sizes[name] != original[name].numel())]
