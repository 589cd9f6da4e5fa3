"""moerl's update against a bare Megatron-Core loop on the same model, sequences and packing, in turns in one process.

    python benchmarks/update_overhead.py --tokens 512 --micro-batches 8

The bare loop: forward_backward_func over packed micro-batches that lie ready as tensors, Megatron's vocab_parallel_cross_entropy, the
optimizer's step. moerl's side does what a run does besides: plan, pack, log-probs with entropy, the loss with its statistics, the
check for finite numbers. Both minimise the negative log-likelihood of the same response tokens.
"""

import argparse
import cProfile
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import megatron_patches

megatron_patches.activate()

from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from moerl.algorithms.mini_batch_loss import SUPERVISED  # noqa: E402
from moerl.config.schema.layout import Layout  # noqa: E402
from moerl.config.schema.train_config import OptimizerConfig, TrainConfig  # noqa: E402
from moerl.train.engine_settings import EngineSettings  # noqa: E402
from moerl.train.loss.logprobs import HeadInput  # noqa: E402
from moerl.train.megatron.process_groups import initialize_groups  # noqa: E402
from moerl.train.megatron_engine import MegatronEngine  # noqa: E402
from moerl.types.batch import TrainBatch  # noqa: E402

LR = 1e-4
MODEL_OPTIONS = argparse.ArgumentParser(add_help=False)
MODEL_OPTIONS.add_argument("--family", choices=["qwen3", "qwen3_moe"], default="qwen3_moe")
MODEL_OPTIONS.add_argument("--tokens", type=int, default=512, help="of a micro-batch")
MODEL_OPTIONS.add_argument("--vocabulary", type=int, default=4096)
MODEL_OPTIONS.add_argument("--micro-batches", type=int, default=4)
MODEL_OPTIONS.add_argument("--repeats", type=int, default=6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """One micro-batch of the bare loop."""

    tokens: Tensor  # [1, T]
    positions: Tensor  # [1, T]
    labels_T: Tensor
    weight_T: Tensor
    """What a token's loss counts; 0 where there is no response token."""
    sequences: PackedSeqParams


def bare_update(engine: MegatronEngine, micro_batches: list[Ready]) -> float:
    for chunk in engine.model.wrapped:
        chunk.zero_grad_buffer()  # type: ignore[operator]
    engine.optimizer.zero_grad()
    outputs = get_forward_backward_func()(
        forward_step_func=_bare_forward,
        data_iterator=iter(micro_batches),
        model=engine.model.wrapped,
        num_microbatches=len(micro_batches),
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
    )
    engine.optimizer.step()
    return float(torch.stack([output["loss"] for output in outputs]).sum())


def _bare_forward(iterator: Iterator[Ready], model: Any) -> tuple[Tensor, Any]:
    micro = next(iterator)
    return model(micro.tokens, micro.positions, None, packed_seq_params=micro.sequences), partial(_bare_loss, micro)


def _bare_loss(micro: Ready, outputs: tuple[HeadInput, ...]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Whole logits, as Megatron's own output layer makes them."""
    logits_TV = torch.nn.functional.linear(outputs[0].hidden_TH, outputs[0].weight_VH)
    loss_T = vocab_parallel_cross_entropy(logits_TV[:, None].float(), micro.labels_T[:, None])[:, 0]
    loss = (loss_T * micro.weight_T).sum()
    return loss, torch.zeros((), dtype=torch.int), {"loss": loss.detach()}


def ready(engine: MegatronEngine, batch: TrainBatch) -> list[Ready]:
    num_tokens = int(batch.response_mask_T.sum())
    result = []
    for micro in engine.step.micro_batches(engine.step.share(batch, engine.step.plan(batch))):
        bounds = torch.from_numpy(micro.cu_seqlens)
        lengths = {"max_seqlen_q": micro.max_seqlen, "max_seqlen_kv": micro.max_seqlen}
        result.append(
            Ready(
                tokens=torch.from_numpy(micro.token_ids_T)[None],
                positions=torch.from_numpy(micro.position_ids_T)[None],
                labels_T=torch.from_numpy(micro.labels_T),
                weight_T=torch.from_numpy(micro.response_mask_T).float() / num_tokens,
                sequences=PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, **lengths),
            )
        )
    return result


def random_batch(rng: np.random.Generator, *, num_tokens: int, vocab_size: int, longest: int) -> TrainBatch:
    lengths: list[int] = []
    while sum(lengths) < num_tokens:
        lengths.append(int(rng.integers(longest // 8, longest)))
    return batch_of(rng, lengths, num_asked=longest // 16, vocab_size=vocab_size)


def batch_of(rng: np.random.Generator, lengths: Sequence[int], *, num_asked: int, vocab_size: int) -> TrainBatch:
    """Random tokens; the first `num_asked` of each sequence are its prompt."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    total = int(offsets[-1])
    mask_T = np.ones(total, dtype=bool)
    for start in offsets[:-1]:
        mask_T[start : start + num_asked] = False
    zeros_T = np.zeros(total, dtype=np.float32)
    return TrainBatch(
        token_ids_T=rng.integers(5, vocab_size, size=total),
        response_mask_T=mask_T,
        rollout_logprobs_T=zeros_T - np.float32(np.log(vocab_size)),
        advantages_T=zeros_T + 1,
        ce_weight_T=mask_T.astype(np.float32),
        offsets=offsets,
    )


def write_model(arguments: argparse.Namespace, directory: Path) -> None:
    """Hugging Face files of random weights, always the same."""
    shape = {
        "vocab_size": arguments.vocabulary, "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 3,
        "head_dim": 64, "intermediate_size": 1024, "max_position_embeddings": arguments.tokens, "tie_word_embeddings": True,
    }  # fmt: skip
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 384, "norm_topk_prob": True, "decoder_sparse_step": 1}
    config = AutoConfig.for_model(arguments.family, **shape, **(experts if arguments.family == "qwen3_moe" else {}))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)


def build(arguments: argparse.Namespace, directory: Path, layout: Layout) -> MegatronEngine:
    train = TrainConfig(optimizer=OptimizerConfig(lr=LR), layout=layout, dtype="float32", micro_batch_tokens=arguments.tokens)
    initialize_groups(layout, 1)
    return MegatronEngine(
        EngineSettings(
            train=train, model_dir=directory, max_context=arguments.tokens, temperature=1.0, uses_reference=False, export_dtype="float32"
        )
    )


def in_turns(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats):
        for name in list(calls)[:: 1 if turn % 2 else -1]:
            start = time.process_time()
            calls[name]()
            seconds[name].append(time.process_time() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[MODEL_OPTIONS])
    parser.add_argument("--profile", action="store_true", help="where moerl's own part goes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as directory:
        write_model(arguments, Path(directory))
        engine = build(arguments, Path(directory), Layout())
    vocab_size = engine.model.vocab_size
    rng = np.random.default_rng(0)
    num_tokens = arguments.tokens * arguments.micro_batches * 9 // 10
    batch = random_batch(rng, num_tokens=num_tokens, vocab_size=vocab_size, longest=arguments.tokens // 2)
    micro_batches = ready(engine, batch)
    calls: dict[str, Callable[[], object]] = {
        "bare": lambda: bare_update(engine, micro_batches),
        "moerl": lambda: engine.update(batch, SUPERVISED, lr=LR, num_updates=1),
    }
    for call in calls.values():
        call()
    million = sum(p.numel() for p in engine.model.chunks[0].parameters()) / 1e6
    size = f"{len(batch.token_ids_T)} tokens of {batch.num_sequences} sequences"
    print(f"{arguments.family}, {million:.0f} M parameters, vocabulary {vocab_size}, {size}")
    seconds = in_turns(calls, arguments.repeats)
    bare, moerl = (statistics.median(seconds[name]) for name in ("bare", "moerl"))
    pairs = sorted(b / a for a, b in zip(seconds["bare"], seconds["moerl"], strict=True))
    print(f"{len(micro_batches)} micro-batches: bare {bare:.3f} s, moerl {moerl:.3f} s of CPU time")
    spread = f"{statistics.median(pairs) - 1:+.1%} (median of pairs, {pairs[0]:.3f} to {pairs[-1]:.3f})"
    print(f"overhead: {moerl / bare - 1:+.1%} (medians), {spread}")
    if arguments.profile:
        profile = cProfile.Profile()
        profile.runcall(calls["moerl"])
        pstats.Stats(profile).sort_stats("cumulative").print_stats("moerl", 30)


if __name__ == "__main__":
    main()
