"""Output layer, log-probs and entropy in one, over a vocabulary that tensor-parallel ranks share, a chunk of tokens at a time.

Logits of one chunk are all that exist, forward and again backward, which makes them anew but for the last chunk's, which are there. A
micro-batch's would take more than the model's own activations (16,384 tokens of DeepSeek-V3 4.2 GB in bfloat16, their gradient as much).
They cost a fourth product with the output layer beside three, and those of tokens that no loss asks about are never made.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moerl.config.schema.train_config import PRODUCT_ROWS
from moerl.types.kept_vocabulary import KeptVocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadInput:
    """Input of the output layer, and its weight."""

    hidden_TH: Tensor
    """States of all tokens, on every tensor-parallel rank; their gradient is of this rank's logits alone."""
    weight_VH: Tensor
    """This rank's rows of the padded vocabulary. Has it a `main_grad`, as parameters in Megatron's DistributedDataParallel, its gradient is
    added to that."""
    is_embedding: bool = False
    """The weight is this rank's embedding too, and gets a gradient from there."""


def logprobs_and_entropy(
    head: HeadInput, labels_T: Tensor, *, temperature: float, vocab_size: int, group: dist.ProcessGroup, chunk_tokens: int,
    entropy_has_gradient: bool = False, sets: KeptVocabulary | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """[T] log-prob of each label, with gradient, and entropy in nats, without if no loss has an entropy term; both of
    softmax(logits / temperature), in float32, or in float64 for a model in float64.

    Entries of the vocabulary from `vocab_size` on have probability 0, like logits of -inf, which have no part in the entropy; the log-prob
    of such a label is -inf. `sets`: of T tokens; outside a token's set entries have probability 0 too. Collective over `group`: two
    reductions of a few values per token. Peak memory: a chunk [chunk_tokens, V / tp] in the model's dtype and two in the result's, a few
    values per token, the gradient of the states, and some 40 bytes for each entry of this rank that the sets of a chunk have. Without sets
    a chunk in the result's dtype stays from the forward to the backward pass.
    """
    width = len(head.weight_VH)
    shard = _Shard(
        weight_VH=head.weight_VH,
        is_embedding=head.is_embedding,
        first=group.rank() * width,
        num_valid=min(max(vocab_size - group.rank() * width, 0), width),
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        group=group,
        entropy_has_gradient=entropy_has_gradient,
        sets=sets,
    )
    return _ChunkedLogProbs.apply(head.hidden_TH, head.weight_VH, labels_T, shard)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shard:
    """This rank's part of the vocabulary, and how to walk over the tokens."""

    weight_VH: Tensor
    is_embedding: bool
    first: int
    num_valid: int
    """Columns before the padding of the vocabulary."""
    temperature: float
    chunk_tokens: int
    group: dist.ProcessGroup
    entropy_has_gradient: bool = False
    sets: KeptVocabulary | None = None

    def chunks(self, hidden_TH: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Tokens, and their scaled logits in one buffer that every chunk uses again."""
        num_tokens, width = len(hidden_TH), len(self.weight_VH)
        dtype = torch.promote_types(hidden_TH.dtype, torch.float32)
        logits = hidden_TH.new_empty(min(self.chunk_tokens, num_tokens), width)
        scaled = logits if logits.dtype == dtype else torch.empty_like(logits, dtype=dtype)
        for start in range(0, num_tokens, self.chunk_tokens):
            tokens = slice(start, min(start + self.chunk_tokens, num_tokens))
            logits_CV, scaled_CV = (each[: tokens.stop - start] for each in (logits, scaled))
            torch.mm(hidden_TH[tokens], self.weight_VH.t(), out=logits_CV)
            if scaled is not logits:
                scaled_CV.copy_(logits_CV)
            scaled_CV.div_(self.temperature)
            scaled_CV[:, self.num_valid :] = _floor(dtype)
            yield tokens, scaled_CV

    def left(self, scaled_CV: Tensor, tokens: slice) -> "_Left | None":
        """Entries that sampling left for these tokens; None without sets."""
        if self.sets is None:
            return None
        first, end = self.sets.offsets[tokens.start], self.sets.offsets[tokens.stop]
        counts = self.sets.counts[tokens]
        ids = self.sets.ids[first:end] - self.first
        here = (ids >= 0) & (ids < self.num_valid)  # before anything goes to the device
        device = scaled_CV.device
        rows = torch.from_numpy(np.repeat(np.arange(len(counts)), counts)[here]).to(device)
        columns = torch.from_numpy(ids[here]).to(device, torch.int64)
        values = scaled_CV[rows, columns].clamp_(min=_floor(scaled_CV.dtype))
        return _Left(is_restricted_C=torch.from_numpy(counts > 0).to(device), rows=rows, columns=columns, values=values)

    def has_only_sets(self, tokens: slice) -> bool:
        return self.sets is not None and bool((self.sets.counts[tokens] > 0).all())

    def local(self, labels_T: Tensor) -> tuple[Tensor, Tensor]:
        """The column of each label in this shard, 0 for those of other ranks, and whether it is here."""
        columns_T = labels_T - self.first
        here_T = (columns_T >= 0) & (columns_T < self.num_valid)
        return torch.where(here_T, columns_T, 0), here_T


@dataclass(frozen=True, slots=True, kw_only=True)
class _Left:
    """Entries of this rank that sampling left for the tokens of a chunk, token by token: all others have probability 0."""

    is_restricted_C: Tensor  # bool: the token has a set
    rows: Tensor  # int64 [entries], token of each
    columns: Tensor  # int64 [entries]
    values: Tensor  # [entries], scaled logits

    def sums(self) -> tuple[Tensor, Tensor]:
        """As of `_local_sums`, the first two; sums of a token's entries in their order, so that they have the same bits every time."""
        lengths = torch.bincount(self.rows, minlength=len(self.is_restricted_C))
        maximum_C = torch.segment_reduce(self.values, "max", lengths=lengths, initial=_floor(self.values.dtype))
        shifted = self.values - maximum_C[self.rows]
        weights = shifted.exp()
        return maximum_C, torch.stack([torch.segment_reduce(each, "sum", lengths=lengths) for each in (weights, shifted * weights)])


def _floor(dtype: torch.dtype) -> float:
    """Logit of probability 0 beside any logit, and finite: a rank that holds nothing else has a maximum too, 0 times it is 0, and so is its
    sum over the columns of a vocabulary."""
    return torch.finfo(dtype).min / 2**24


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, shard: _Shard) -> tuple[Tensor, Tensor]:
        local_maximum_T, sums_3T, last_CV = _local_sums(hidden_TH, labels_T, shard)
        maximum_T, sums_3T = _reduce(local_maximum_T, sums_3T, shard.group)
        log_sum_T, mean_T, label_T = sums_3T[0].log(), sums_3T[1] / sums_3T[0], sums_3T[2]
        entropy_T = log_sum_T - mean_T
        log_sum_T += maximum_T
        ctx.shard, ctx.last_CV = shard, last_CV
        if shard.entropy_has_gradient:
            ctx.save_for_backward(hidden_TH, labels_T, log_sum_T, local_maximum_T, entropy_T)
        else:
            ctx.save_for_backward(hidden_TH, labels_T, log_sum_T, local_maximum_T)
            ctx.mark_non_differentiable(entropy_T)
        return label_T - log_sum_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        """Gradients over logits, / temperature: of a log-prob 1 at the label - probability; of the entropy -probability * (log
        probability + entropy)."""
        hidden_TH, labels_T, log_sum_T, maximum_T, *entropy = ctx.saved_tensors
        shard: _Shard = ctx.shard
        weight_T = gradients[0] / shard.temperature
        columns_T, here_T = shard.local(labels_T)
        gradient_TH = torch.empty_like(hidden_TH)
        of_weight = _WeightGradient(shard.weight_VH, is_embedding=shard.is_embedding)
        slope_T = None if not entropy else -gradients[1] / shard.temperature

        def of(shifted: Tensor, rows: Any) -> Tensor:
            """Gradient but for labels, in the place of log-probs of some entries; `rows`: index that gives values of their tokens."""
            if slope_T is None:
                return shifted.exp_().mul_(-weight_T[rows])
            # Log-probs so low that their product with a probability of 0 would not be 0 stand for padding.
            factor = shifted.clamp(min=-1e4).add_(entropy[0][rows]).mul_(slope_T[rows]).sub_(weight_T[rows])
            return shifted.exp_().mul_(factor)

        def add(tokens: slice, shifted_CV: Tensor, left: _Left | None) -> None:
            """`shifted_CV`: logits less their maximum, as the forward pass left those of the last chunk; becomes their gradient."""
            of(shifted_CV.sub_((log_sum_T - maximum_T)[tokens, None]), (tokens, None))
            if left is not None:
                shifted_CV[left.is_restricted_C] = 0
                rows = left.rows + tokens.start
                shifted_CV[left.rows, left.columns] = of(left.values - log_sum_T[rows], rows)
            shifted_CV.scatter_add_(1, columns_T[tokens, None], (weight_T * here_T)[tokens, None])
            gradient_CV = shifted_CV.to(hidden_TH.dtype)
            torch.mm(gradient_CV, shard.weight_VH, out=gradient_TH[tokens])
            of_weight.add(gradient_CV, hidden_TH[tokens])

        last_CV, ctx.last_CV = ctx.last_CV, None  # a second backward pass makes it anew
        num_left = len(hidden_TH)
        if last_CV is not None:
            num_left -= len(last_CV)
            add(slice(num_left, len(hidden_TH)), last_CV, None)
            del last_CV  # before there is another chunk
        for tokens, scaled_CV in shard.chunks(hidden_TH[:num_left]):
            left = shard.left(scaled_CV, tokens)
            add(tokens, scaled_CV.sub_(maximum_T[tokens, None]), left)
        return gradient_TH, of_weight.result() if ctx.needs_input_grad[1] else None, None, None


class _WeightGradient:
    """Gradient of the output layer, summed over chunks of tokens in the dtype in which Megatron sums over micro-batches."""

    def __init__(self, weight_VH: Tensor, *, is_embedding: bool):
        main: Tensor | None = getattr(weight_VH, "main_grad", None)
        wide = torch.promote_types(weight_VH.dtype, torch.float32)
        self._weight_VH, self._is_embedding, self._is_main = weight_VH, is_embedding, main is not None
        self._total_VH = torch.zeros_like(weight_VH, dtype=wide) if main is None else main

    def add(self, gradient_CV: Tensor, hidden_CH: Tensor) -> None:
        total = self._total_VH
        for start in range(0, len(total), PRODUCT_ROWS):
            rows = slice(start, start + PRODUCT_ROWS)
            of_rows = gradient_CV[:, rows].t()
            if total.dtype == hidden_CH.dtype:
                total[rows].addmm_(of_rows, hidden_CH)
            elif hidden_CH.is_cuda:
                total[rows].add_(torch.mm(of_rows, hidden_CH, out_dtype=total.dtype))
            else:
                total[rows].addmm_(of_rows.to(total.dtype), hidden_CH.to(total.dtype))

    def result(self) -> Tensor | None:
        """Gradient for autograd. DistributedDataParallel's hook on the parameter adds its `grad` to main_grad and wants one: of zeros,
        without memory, where nothing else brings one."""
        if not self._is_main:
            return self._total_VH.to(self._weight_VH.dtype)
        if self._weight_VH.grad is None and not self._is_embedding:
            self._weight_VH.grad = self._weight_VH.new_zeros(1).expand_as(self._weight_VH)
        return None


def _local_sums(hidden_TH: Tensor, labels_T: Tensor, shard: _Shard) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sums of this rank's columns [T]: the maximum m; [3, T]: sum of e = exp(x - m), sum of e (x - m), the label's x or 0. And x - m of the
    last chunk; None: it is not what the backward pass needs."""
    columns_T, here_T = shard.local(labels_T)
    dtype = torch.promote_types(hidden_TH.dtype, torch.float32)
    maximum_T = hidden_TH.new_empty(len(hidden_TH), dtype=dtype)
    sums_3T = hidden_TH.new_empty(3, len(hidden_TH), dtype=dtype)
    weights = shifted_CV = None
    for tokens, scaled_CV in shard.chunks(hidden_TH):
        label_C = scaled_CV.gather(1, columns_T[tokens, None])[:, 0]
        sums_3T[2, tokens] = torch.where(here_T[tokens], label_C, 0.0)
        left = shard.left(scaled_CV, tokens)
        if not shard.has_only_sets(tokens):
            scaled_CV.clamp_(min=_floor(dtype))  # logits may be -inf
            maximum_T[tokens] = scaled_CV.amax(-1)
            shifted_CV = scaled_CV.sub_(maximum_T[tokens, None])
            weights = torch.empty_like(scaled_CV) if weights is None else weights
            weights_CV = torch.exp(shifted_CV, out=weights[: len(shifted_CV)])
            sums_3T[0, tokens] = weights_CV.sum(-1)
            sums_3T[1, tokens] = weights_CV.mul_(shifted_CV).sum(-1)
        if left is not None:
            largest_C, sums_2C = left.sums()
            maximum_T[tokens] = torch.where(left.is_restricted_C, largest_C, maximum_T[tokens])
            sums_3T[:2, tokens] = torch.where(left.is_restricted_C, sums_2C, sums_3T[:2, tokens])
    return maximum_T, sums_3T, shifted_CV if shard.sets is None else None


def _reduce(local_maximum_T: Tensor, sums_3T: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """The same over all ranks: sums of different maxima are made relative to the common one before they are added."""
    maximum_T = local_maximum_T.clone()
    dist.all_reduce(maximum_T, op=dist.ReduceOp.MAX, group=group)
    shift_T = local_maximum_T - maximum_T
    sums_3T[1] += shift_T * sums_3T[0]
    sums_3T[:2] *= shift_T.exp()
    dist.all_reduce(sums_3T, group=group)
    return maximum_T, sums_3T
