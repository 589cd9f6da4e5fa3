"""What an update is made of on a CPU: moerl's beside transformers' on the same model and tokens, and beside its matrix products alone.

    python benchmarks/update_parts.py --experts grouped_mm

Three ways in turns in one process, in CPU seconds: moerl's update on Megatron; transformers' forward and backward pass with one of its
implementations of experts, torch's fused AdamW and a clipped norm; and the matrix products of moerl's update alone, on operands that lie
ready. Sequences have one length, so that transformers needs neither padding nor masks. Both minimise the negative log-likelihood of the
response tokens from equal weights.

Then moerl's update part by part, from PyTorch's profile of one update, whose own cost makes small operations dearer: an operation counts
for the part of the model that called it, one of the backward pass for the part whose forward operation it follows from.
"""

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoModelForCausalLM
from update_overhead import LR, MODEL_OPTIONS, batch_of, build, in_turns, write_model  # activates the patches, before Megatron is imported

from megatron.core.models.gpt import gpt_model  # isort: skip
from megatron.core.transformer import attention, transformer_layer  # isort: skip
from megatron.core.transformer.moe import experts, router, token_dispatcher  # isort: skip
from transformer_engine.pytorch import attention as te_attention  # isort: skip
from transformer_engine.pytorch import linear as te_linear  # isort: skip
from transformer_engine.pytorch import norm as te_norm  # isort: skip

from moerl.algorithms.mini_batch_loss import SUPERVISED  # isort: skip
from moerl.config.schema.layout import Layout  # isort: skip
from moerl.train.megatron_engine import MegatronEngine  # isort: skip

_PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_")
_MARK = "part: "
_REST = "log-probs, loss, plan and statistics"
Product = tuple[tuple[int, ...], tuple[int, ...]]
"""Shapes of a product's two operands."""


# -- the three ways ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transformers:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    micro_batches: tuple[Tensor, ...]
    """[sequences, length] each."""

    def update(self) -> float:
        """The loss."""
        self.optimizer.zero_grad()
        count = sum(tokens[:, 1:].numel() for tokens in self.micro_batches)
        total = 0.0
        for tokens in self.micro_batches:
            logits = self.model(input_ids=tokens, use_cache=False).logits[:, :-1].flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum") / count
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return total


def products_alone(products: Sequence[Product]) -> Callable[[], None]:
    operands = {shapes: [torch.randn(shape) for shape in shapes] for shapes in set(products)}
    results = {(left, right): torch.empty(left[0], right[1]) for left, right in operands}

    def run() -> None:
        for shapes in products:
            torch.mm(*operands[shapes], out=results[shapes])

    return run


# -- the parts -----------------------------------------------------------------------------------------------------


def parts(engine: MegatronEngine) -> list[tuple[str, Any, tuple[str, ...]]]:
    """Name, and the methods of a class, module or object that make it; what they call besides is its own part."""
    dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
    moves = ("dispatch_preprocess", "token_dispatch", "dispatch_postprocess", "combine_preprocess", "token_combine", "combine_postprocess")
    return [
        ("attention of the sequences", te_attention.DotProductAttention, ("forward",)),
        ("queries, keys and their rotation", attention.SelfAttention, ("forward",)),
        ("norms", te_linear, ("normalize",)),
        ("norms", te_norm, ("normalize",)),
        ("experts: the choice", router.TopKRouter, ("forward",)),
        ("experts: tokens sorted and brought back", dispatcher, moves),
        ("experts: one layer after the other", te_linear.GroupedLinear, ("forward",)),
        ("experts: activation", experts.TEGroupedMLP, ("forward",)),
        ("other linear layers", te_linear.LayerNormLinear, ("forward",)),
        ("other linear layers", te_linear.Linear, ("forward",)),
        ("residuals, embeddings", transformer_layer.TransformerLayer, ("forward",)),
        ("residuals, embeddings", gpt_model.GPTModel, ("forward",)),
        ("norm of the gradients", engine.optimizer, ("prepare_grads", "get_grad_norm")),
        ("optimizer", engine.optimizer, ("step",)),
    ]


def mark(name: str, owner: Any, methods: Sequence[str]) -> None:
    for method_name in methods:
        method = getattr(owner, method_name)

        @wraps(method)
        def marked(*args: Any, method: Callable[..., Any] = method, **kwargs: Any) -> Any:
            with record_function(_MARK + name):
                return method(*args, **kwargs)

        setattr(owner, method_name, marked)


def seconds_of_parts(events: Iterable[Any]) -> tuple[dict[str, float], dict[str, float]]:
    """CPU seconds by part: of matrix products, and of all else."""
    events = list(events)
    by_sequence: dict[int, str] = {}
    for event in events:
        if event.sequence_nr >= 0 and (part := _outer(event, _MARK)) and _outer(event, "autograd::engine") is None:
            by_sequence.setdefault(event.sequence_nr, part.name)
    products: dict[str, float] = defaultdict(float)
    rest: dict[str, float] = defaultdict(float)
    for event in events:
        part, node = _outer(event, _MARK), _outer(event, "autograd::engine")
        name = by_sequence.get(node.sequence_nr, _REST) if part is None and node is not None else _REST if part is None else part.name
        if node is not None and "AccumulateGrad" in node.name:
            name = "gradients added up"
        (products if event.name in _PRODUCTS else rest)[name.removeprefix(_MARK)] += event.self_cpu_time_total / 1e6
    return products, rest


def _outer(event: Any, prefix: str) -> Any:
    """The event itself or the innermost around it of that name."""
    while event is not None and not event.name.startswith(prefix):
        event = event.cpu_parent
    return event


def products_of(events: Iterable[Any]) -> list[Product]:
    """Of mm the first two arguments, of addmm the second and third."""
    calls = [(event.input_shapes, int(event.name != "aten::mm")) for event in events if event.name in _PRODUCTS]
    return [(tuple(shapes[first]), tuple(shapes[first + 1])) for shapes, first in calls]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[MODEL_OPTIONS])
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--experts", choices=["eager", "batched_mm", "grouped_mm"], default="grouped_mm", help="of transformers")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as directory:
        write_model(arguments, Path(directory))
        engine = build(arguments, Path(directory), Layout())
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, experts_implementation=arguments.experts).train()
    num_sequences = arguments.tokens // arguments.length
    lengths = [arguments.length] * (num_sequences * arguments.micro_batches)
    batch = batch_of(np.random.default_rng(0), lengths, num_asked=1, vocab_size=model.config.vocab_size)
    tokens = torch.from_numpy(batch.token_ids_T).view(arguments.micro_batches, num_sequences, arguments.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    other = Transformers(model, optimizer, tuple(tokens))

    def update() -> float:
        return engine.update(batch, SUPERVISED, lr=LR, num_updates=1).loss

    print(f"losses of the first update: moerl {update():.6f}, transformers {other.update():.6f}")
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as shapes:
        update()
    calls = {"products alone": products_alone(products_of(shapes.events())), "transformers": other.update, "moerl": update}
    seconds = {name: median(each) for name, each in in_turns(calls, arguments.repeats).items()}
    million = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{arguments.family}, {million:.0f} M parameters, {arguments.micro_batches} micro-batches of {arguments.tokens} tokens")
    for name, each in seconds.items():
        print(f"{name:16s} {each:.3f} s, {each / seconds['products alone']:.2f}, moerl takes {seconds['moerl'] / each:.2f} of it")
    for name, owner, methods in parts(engine):
        mark(name, owner, methods)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        update()
    products, rest = seconds_of_parts(profiled.events())
    whole = sum(products.values()) + sum(rest.values())
    print(f"parts of one update of {whole:.3f} s under the profile:")
    print(f"{sum(products.values()):8.3f} s {sum(products.values()) / whole:6.1%}  matrix products")
    for name, each in sorted(rest.items(), key=lambda item: -item[1]):
        print(f"{each:8.3f} s {each / whole:6.1%}  {name}")


if __name__ == "__main__":
    main()
