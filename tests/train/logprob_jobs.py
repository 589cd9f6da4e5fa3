"""What the ranks of the log-prob tests do: chunked log-probs beside those of whole logits, and the memory both need."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moerl.config.schema.layout import Layout
from moerl.types.kept_vocabulary import KeptVocabulary

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Random logits of `num_tokens` x `vocab_size`, cut over `tp` ranks. `spread`: their standard deviation. `num_dead`: columns of -1e30,
    the first ones."""

    tp: int = 1
    num_tokens: int = 37
    vocab_size: int = 101
    dtype: str = "float32"
    temperature: float = 1.0
    chunk_tokens: int = 8
    spread: float = 3.0
    num_dead: int = 0
    num_left: int = 0
    """Entries that sampling left, the label among them; 0: all. Every third token has all."""
    entropy_weight: float = 0.0
    """Weight of the entropies beside the log-probs in the loss; 0: the entropy has no gradient."""

    def sets(self) -> KeptVocabulary | None:
        if self.num_left == 0:
            return None
        _, labels_T, _ = self.whole()
        rng = np.random.default_rng(0)
        rows = [
            [] if token % 3 == 0 else [label, *rng.choice(np.delete(np.arange(self.vocab_size), label), self.num_left - 1, replace=False)]
            for token, label in enumerate(labels_T.tolist())
        ]
        return KeptVocabulary.of_counts(np.array([entry for row in rows for entry in row]), np.array([len(row) for row in rows]))

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // self.tp) * self.tp

    def whole(self) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [T, V] without padding in the case's dtype, labels, and the weight of each log-prob in a loss."""
        generator = torch.Generator().manual_seed(0)
        logits_TV = torch.randn(self.num_tokens, self.vocab_size, generator=generator, dtype=torch.float64) * self.spread
        logits_TV[:, : self.num_dead] = -1e30
        labels_T = torch.randint(self.vocab_size, (self.num_tokens,), generator=generator)
        labels_T[:2] = torch.tensor([0, self.vocab_size - 1])
        weight_T = torch.randn(self.num_tokens, generator=generator, dtype=torch.float64)
        return logits_TV.to(getattr(torch, self.dtype)), labels_T, weight_T


@dataclass(frozen=True, kw_only=True)
class Values:
    logprobs_T: np.ndarray
    entropy_T: np.ndarray
    gradient_TV: np.ndarray
    """Of the weighted sum of log-probs, whole, padding columns included."""
    dtypes: tuple[str, str, str]


def chunked(case: Case) -> Values:
    from moerl.train.loss.logprobs import HeadInput, logprobs_and_entropy

    def compute(logits_TV: Tensor, labels_T: Tensor, group: dist.ProcessGroup) -> Pair:
        options: dict[str, Any] = {"temperature": case.temperature, "vocab_size": case.vocab_size, "chunk_tokens": case.chunk_tokens}
        options |= {"entropy_has_gradient": case.entropy_weight != 0, "sets": case.sets()}
        # An output layer that takes the columns of this rank: the states are the logits of all of them.
        hidden_TH = GatherColumns.apply(logits_TV, group)
        weight_VH = torch.eye(hidden_TH.shape[1], dtype=logits_TV.dtype).chunk(group.size())[group.rank()]
        return logprobs_and_entropy(HeadInput(hidden_TH=hidden_TH, weight_VH=weight_VH), labels_T, group=group, **options)

    return _evaluate(case, compute)


class GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.columns = slice(group.rank() * logits_TV.shape[1], (group.rank() + 1) * logits_TV.shape[1])
        return _gather(logits_TV.detach(), group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Every rank's gradient is of its own columns alone."""
        others = gradients[0].clone()
        others[:, ctx.columns] = 0
        assert not others.any()
        return gradients[0][:, ctx.columns], None


@dataclass(frozen=True, kw_only=True)
class HeadCase:
    """Random states and an output layer."""

    tp: int = 1
    dtype: str = "float32"
    chunk_tokens: int = 8
    accumulates: bool = False
    """The weight has a main_grad, in which something is already."""

    def whole(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[37, 16] states, [101, 16] weight, labels, and the weight of each log-prob in a loss."""
        generator = torch.Generator().manual_seed(0)
        states, weight = (torch.randn(size, 16, generator=generator, dtype=torch.float64) / 2 for size in (37, 101))
        dtype = getattr(torch, self.dtype)
        labels_T = torch.randint(101, (37,), generator=generator)
        return states.to(dtype), weight.to(dtype), labels_T, torch.randn(37, generator=generator, dtype=torch.float64)


def through_the_head(case: HeadCase) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Log-probs, entropies and gradients of states and weight, padding left out. The loss has both, and two calls share the weight."""
    from megatron.core import parallel_state

    from moerl.train.loss.logprobs import HeadInput, logprobs_and_entropy
    from moerl.train.megatron.process_groups import initialize_groups

    initialize_groups(Layout(ranks=case.tp, tp=case.tp), 1)
    group = parallel_state.get_tensor_model_parallel_group()
    states_TH, whole_VH, labels_T, weight_T = case.whole()
    padded_VH = torch.nn.functional.pad(whole_VH, (0, 0, 0, -len(whole_VH) % case.tp), value=7.0)
    weight_VH = torch.nn.Parameter(padded_VH.chunk(case.tp)[group.rank()].clone())
    if case.accumulates:
        weight_VH.main_grad = torch.ones_like(weight_VH, dtype=torch.promote_types(weight_VH.dtype, torch.float32))  # type: ignore[attr-defined]
    states_TH.requires_grad_()
    head, options = HeadInput(hidden_TH=states_TH, weight_VH=weight_VH), {"group": group, "vocab_size": len(whole_VH)}
    found = [
        logprobs_and_entropy(head, labels, temperature=0.7, chunk_tokens=case.chunk_tokens, entropy_has_gradient=True, **options)
        for labels in (labels_T, labels_T.flip(0))
    ]
    sum(((logp + 0.5 * entropy) * weight_T.to(logp.dtype)).sum() for logp, entropy in found).backward()
    assert states_TH.grad is not None and weight_VH.grad is not None
    dist.all_reduce(states_TH.grad, group=group)
    of_weight = weight_VH.main_grad - 1 + weight_VH.grad if case.accumulates else weight_VH.grad  # type: ignore[attr-defined]
    shards = [torch.empty_like(of_weight) for _ in range(case.tp)]
    dist.all_gather(shards, of_weight.contiguous(), group=group)
    gradients = (states_TH.grad, torch.cat(shards)[: len(whole_VH)])
    logprobs_T, entropy_T = (each.detach().double().numpy() for each in found[0])
    return logprobs_T, entropy_T, *(each.double().numpy() for each in gradients)  # type: ignore[return-value]


def of_megatron(case: Case) -> Values:
    """Megatron's own cross-entropy, whose entropy is that of the gathered logits."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    def compute(logits_TV: Tensor, labels_T: Tensor, group: dist.ProcessGroup) -> Pair:
        scaled_TV = logits_TV.float() / case.temperature
        first = group.rank() * logits_TV.shape[1]
        padding_V = torch.arange(first, first + logits_TV.shape[1]) >= case.vocab_size
        scaled_TV = scaled_TV.masked_fill(padding_V, torch.finfo(torch.float32).min / 2)
        table_TV = _gather(scaled_TV.detach(), group).log_softmax(-1)
        entropy_T = -(table_TV.exp() * table_TV).sum(-1)
        return -vocab_parallel_cross_entropy(scaled_TV[:, None].contiguous(), labels_T[:, None])[:, 0], entropy_T

    return _evaluate(case, compute)


def _evaluate(case: Case, compute: Callable[[Tensor, Tensor, dist.ProcessGroup], Pair]) -> Values:
    from megatron.core import parallel_state

    from moerl.train.megatron.process_groups import initialize_groups

    initialize_groups(Layout(ranks=case.tp, tp=case.tp), 1)
    group = parallel_state.get_tensor_model_parallel_group()
    whole_TV, labels_T, weight_T = case.whole()
    # What stands in the padding must not matter.
    padded_TV = torch.nn.functional.pad(whole_TV, (0, case.padded_vocab_size - case.vocab_size), value=50.0)
    logits_TV = padded_TV.chunk(case.tp, dim=1)[group.rank()].clone().requires_grad_()
    logprobs_T, entropy_T = compute(logits_TV, labels_T, group)
    assert entropy_T.requires_grad == (case.entropy_weight != 0)
    loss = (logprobs_T * weight_T.to(logprobs_T.dtype)).sum()
    if case.entropy_weight:
        loss = loss + case.entropy_weight * (entropy_T * weight_T.flip(0).to(logprobs_T.dtype)).sum()
    loss.backward()
    return Values(
        logprobs_T=logprobs_T.detach().numpy(),
        entropy_T=entropy_T.detach().numpy(),
        gradient_TV=_gather(logits_TV.grad, group).double().numpy(),
        dtypes=tuple(str(t.dtype).removeprefix("torch.") for t in (logprobs_T, entropy_T, logits_TV.grad)),  # type: ignore[arg-type]
    )


def _gather(shard_TV: Any, group: dist.ProcessGroup) -> Tensor:
    shards = [torch.empty_like(shard_TV) for _ in range(group.size())]
    dist.all_gather(shards, shard_TV.contiguous(), group=group)
    return torch.cat(shards, dim=1)


def peak_bytes(case: Case) -> tuple[int, int]:
    """Largest number of bytes alive at once, forward and backward, beyond what lived before it: states of 16 numbers, and a weight whose
    gradient is added to what is there."""
    from megatron.core import parallel_state

    from moerl.train.loss.logprobs import HeadInput, logprobs_and_entropy
    from moerl.train.megatron.process_groups import initialize_groups

    initialize_groups(Layout(), 1)
    _, labels_T, _ = case.whole()
    dtype = getattr(torch, case.dtype)
    hidden_TH, weight_VH = (torch.randn(size, 16).to(dtype).requires_grad_() for size in (case.num_tokens, case.vocab_size))
    weight_VH.main_grad = torch.zeros_like(weight_VH, dtype=torch.promote_types(dtype, torch.float32))  # type: ignore[attr-defined]
    head = HeadInput(hidden_TH=hidden_TH, weight_VH=weight_VH)
    group = parallel_state.get_tensor_model_parallel_group()
    options = {"temperature": case.temperature, "vocab_size": case.vocab_size, "chunk_tokens": case.chunk_tokens}
    with LiveBytes() as forward:
        total = logprobs_and_entropy(head, labels_T, group=group, **options)[0].sum()
    with LiveBytes() as backward:
        total.backward()
    return forward.peak, backward.peak


def gradients_twice(case: Case) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of states and weight, by two backward passes over one forward pass: the second finds no chunk of logits left."""
    from megatron.core import parallel_state

    from moerl.train.loss.logprobs import HeadInput, logprobs_and_entropy
    from moerl.train.megatron.process_groups import initialize_groups

    initialize_groups(Layout(), 1)
    _, labels_T, weight_T = case.whole()
    dtype = getattr(torch, case.dtype)
    inputs = [torch.randn(size, 16).to(dtype).requires_grad_() for size in (case.num_tokens, case.vocab_size)]
    logp_T, entropy_T = logprobs_and_entropy(
        HeadInput(hidden_TH=inputs[0], weight_VH=inputs[1]), labels_T, temperature=0.7, vocab_size=case.vocab_size - 1,
        group=parallel_state.get_tensor_model_parallel_group(), chunk_tokens=case.chunk_tokens, entropy_has_gradient=True,
    )  # fmt: skip
    total = (logp_T * weight_T).sum() + 0.5 * (entropy_T * weight_T.flip(0)).sum()
    return [tuple(each.clone() for each in torch.autograd.grad(total, inputs, retain_graph=True)) for _ in range(2)]  # type: ignore[misc]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of every storage that an operation made and that still lives."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.finalize] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        given = {id(t.untyped_storage()) for t in _tensors((args, kwargs))}
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if id(storage) not in given and id(storage) not in self._known:
                self._known[id(storage)] = weakref.finalize(storage, self._free, id(storage), storage.nbytes())
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
        return result

    def _free(self, identity: int, size: int) -> None:
        self.now -= size
        del self._known[identity]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
