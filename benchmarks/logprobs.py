"""Time and peak memory of output layer, log-probs and entropy in chunks, forward and backward, against the same of whole logits.

    python benchmarks/logprobs.py --tokens 2048 --vocabulary 32768 --hidden 512 --chunk 128

Chunked also with an entropy that has a gradient, with `--left` entries of the vocabulary that sampling left for each token, and with
three quarters of the tokens, as where a quarter are prompts. Whole logits: the output layer, a float32 copy, Megatron's
vocab_parallel_cross_entropy, and the entropy from a second pass. `--ways` and `--dtypes` choose; `--repeats 0` measures memory alone, in
one step. Runs on a GPU if there is one.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import megatron_patches

ON_GPU = torch.cuda.is_available()  # before the patches, which make every process look as if it were
megatron_patches.activate()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy  # noqa: E402

from moerl.config.schema.layout import Layout  # noqa: E402
from moerl.train.loss.logprobs import HeadInput, logprobs_and_entropy  # noqa: E402
from moerl.train.megatron.process_groups import initialize_groups  # noqa: E402
from moerl.types.kept_vocabulary import KeptVocabulary  # noqa: E402

Compute = Callable[[], tuple[Tensor, Tensor]]


def whole(head: HeadInput, labels_T: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    scaled_TV = torch.nn.functional.linear(head.hidden_TH, head.weight_VH).float() / 1.0
    with torch.no_grad():
        maximum_T = scaled_TV.max(dim=-1).values
        dist.all_reduce(maximum_T, op=dist.ReduceOp.MAX, group=group)
        shifted_TV = scaled_TV - maximum_T[:, None]
        weights_TV = shifted_TV.exp()
        sums_2T = torch.stack([weights_TV.sum(-1), (weights_TV * shifted_TV).sum(-1)])
        dist.all_reduce(sums_2T, group=group)
        entropy_T = sums_2T[0].log() - sums_2T[1] / sums_2T[0]
    return -vocab_parallel_cross_entropy(scaled_TV[:, None].contiguous(), labels_T[:, None])[:, 0], entropy_T


def step(head: HeadInput, compute: Compute) -> None:
    """Gradients of the weight are added to main_grad, as in training."""
    head.hidden_TH.grad = head.weight_VH.grad = None
    logp_T, entropy_T = compute()
    (logp_T + entropy_T if entropy_T.requires_grad else logp_T).sum().backward()
    head.weight_VH.main_grad.add_(head.weight_VH.grad)  # type: ignore[attr-defined]
    if ON_GPU:
        torch.cuda.synchronize()


def seconds_of(head: HeadInput, computes: list[Compute], repeats: int) -> list[float]:
    """The fastest of `repeats` turns of each, alternating, so that a busy machine disturbs both."""
    fastest = [float("inf")] * len(computes)
    for _ in range(repeats):
        for index, compute in enumerate(computes):
            start = time.perf_counter()
            step(head, compute)
            fastest[index] = min(fastest[index], time.perf_counter() - start)
    return fastest


def peak_bytes(head: HeadInput, compute: Compute) -> int:
    """Of one step beyond what was there, as the system or the CUDA allocator saw it."""
    head.hidden_TH.grad = head.weight_VH.grad = None
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(head, compute)
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = _status_bytes("VmRSS")
    step(head, compute)
    return _status_bytes("VmHWM") - before


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--ways", default="whole,chunked,3/4,entropy,left")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--left", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if ON_GPU else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    initialize_groups(Layout(), 1)
    group = parallel_state.get_tensor_model_parallel_group()
    device = torch.device("cuda" if ON_GPU else "cpu")
    labels_T = torch.randint(arguments.vocabulary, (arguments.tokens,), device=device)
    options = {"temperature": 1.0, "vocab_size": arguments.vocabulary, "group": group, "chunk_tokens": arguments.chunk}
    left_TE = torch.randint(arguments.vocabulary, (arguments.tokens, arguments.left - 1))
    ids_TE = torch.cat([labels_T.cpu()[:, None], left_TE], dim=1).numpy()
    sets = KeptVocabulary.of_counts(ids_TE.ravel(), np.full(arguments.tokens, arguments.left))
    some = 3 * arguments.tokens // 4
    chunk_bytes = arguments.chunk * arguments.vocabulary * 4
    print(f"{arguments.tokens} tokens, vocabulary {arguments.vocabulary}, hidden size {arguments.hidden}")
    print(f"chunks of {arguments.chunk} tokens, {chunk_bytes / 1e6:.0f} MB in float32")
    print("model     way      seconds  ratio   peak")
    for dtype in (getattr(torch, name) for name in arguments.dtypes.split(",")):
        sizes = (arguments.tokens, arguments.vocabulary)
        hidden_TH, weight_VH = (torch.randn(size, arguments.hidden, device=device).to(dtype).requires_grad_() for size in sizes)
        weight_VH.main_grad = torch.zeros_like(weight_VH, dtype=torch.float32)  # type: ignore[attr-defined]
        head = HeadInput(hidden_TH=hidden_TH, weight_VH=weight_VH)
        part = replace(head, hidden_TH=hidden_TH[:some])
        ways: dict[str, Compute] = {
            "whole": lambda head=head: whole(head, labels_T, group),
            "chunked": lambda head=head: logprobs_and_entropy(head, labels_T, **options),
            "3/4": lambda part=part: logprobs_and_entropy(part, labels_T[:some], **options),
            "entropy": lambda head=head: logprobs_and_entropy(head, labels_T, entropy_has_gradient=True, **options),
            "left": lambda head=head: logprobs_and_entropy(head, labels_T, sets=sets, **options),
        }
        ways = {name: ways[name] for name in arguments.ways.split(",")}
        computes = list(ways.values())
        for compute in computes if arguments.repeats else []:
            step(head, compute)
        peaks = [peak_bytes(head, compute) for compute in computes]
        seconds = seconds_of(head, computes, arguments.repeats)
        for name, peak, spent in zip(ways, peaks, seconds, strict=True):
            kind = str(dtype).removeprefix("torch.")
            print(f"{kind:9} {name:8} {spent:7.4f} {spent / seconds[0]:6.2f}   {peak / 1e6:7.1f} MB = {peak / chunk_bytes:5.2f} chunks")


if __name__ == "__main__":
    main()
