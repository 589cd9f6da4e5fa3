"""Log-probs and entropy of vocabulary-parallel logits, a chunk of tokens at a time.

Logits stay in their own dtype. Only one chunk of them exists in float32, forward and backward, so that the memory of a micro-batch
does not grow with vocabulary times tokens times four bytes, which is more than the model's own activations.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moerl.types.sampling_sets import SamplingSets


def logprobs_and_entropy(
    logits_TV: Tensor, labels_T: Tensor, *, temperature: float, vocab_size: int, group: dist.ProcessGroup, chunk_tokens: int,
    entropy_has_gradient: bool = False, sets: SamplingSets | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """[T] log-prob of each label, with gradient, and entropy in nats, without if no loss has an entropy term; both of
    softmax(logits / temperature), in float32, or in float64 for logits in float64.

    `logits_TV` [T, V / tp] is this rank's slice of the padded vocabulary; entries from `vocab_size` on have probability 0, like logits of
    -inf, which have no part in the entropy; the log-prob of such a label is -inf. `sets`: of T tokens; outside a token's set entries have
    probability 0 too. Collective over `group`: two reductions of a few values
    per token. Peak memory beyond logits and their gradient: two chunks [chunk_tokens, V / tp] in the result's dtype forward, one
    backward, a few values per token, and some 40 bytes for each entry of this rank that the sets of a chunk have.
    """
    shard = _Shard(
        first=group.rank() * logits_TV.shape[1],
        num_valid=min(max(vocab_size - group.rank() * logits_TV.shape[1], 0), logits_TV.shape[1]),
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        group=group,
        entropy_has_gradient=entropy_has_gradient,
        sets=sets,
    )
    return _ChunkedLogProbs.apply(logits_TV, labels_T, shard)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shard:
    """This rank's part of the vocabulary, and how to walk over the tokens."""

    first: int
    num_valid: int
    """Columns before the padding of the vocabulary."""
    temperature: float
    chunk_tokens: int
    group: dist.ProcessGroup
    entropy_has_gradient: bool = False
    sets: SamplingSets | None = None

    def chunks(self, logits_TV: Tensor) -> Iterator[tuple[slice, Tensor | None]]:
        """Tokens, and their scaled logits in one buffer that every chunk uses again; None where all of them have sets."""
        num_tokens, width = logits_TV.shape
        dtype = torch.promote_types(logits_TV.dtype, torch.float32)
        buffer = None
        for start in range(0, num_tokens, self.chunk_tokens):
            tokens = slice(start, min(start + self.chunk_tokens, num_tokens))
            if self.sets is not None and (self.sets.counts[tokens] > 0).all():
                yield tokens, None
                continue
            if buffer is None:
                buffer = logits_TV.new_empty(min(self.chunk_tokens, num_tokens), width, dtype=dtype)
            scaled_CV = buffer[: tokens.stop - start]
            scaled_CV.copy_(logits_TV[tokens]).div_(self.temperature)
            scaled_CV[:, self.num_valid :] = _floor(dtype)
            yield tokens, scaled_CV

    def left(self, logits_TV: Tensor, tokens: slice) -> "_Left | None":
        """Entries that sampling left for these tokens; None without sets."""
        if self.sets is None:
            return None
        first, end = self.sets.offsets[tokens.start], self.sets.offsets[tokens.stop]
        counts = self.sets.counts[tokens]
        ids = self.sets.ids[first:end] - self.first
        here = (ids >= 0) & (ids < self.num_valid)  # before anything goes to the device
        device = logits_TV.device
        rows = torch.from_numpy(np.repeat(np.arange(len(counts)), counts)[here]).to(device)
        columns = torch.from_numpy(ids[here]).to(device, torch.int64)
        dtype = torch.promote_types(logits_TV.dtype, torch.float32)
        values = logits_TV[tokens][rows, columns].to(dtype).div_(self.temperature).clamp_(min=_floor(dtype))
        return _Left(is_restricted_C=torch.from_numpy(counts > 0).to(device), rows=rows, columns=columns, values=values)

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
    def forward(ctx: Any, logits_TV: Tensor, labels_T: Tensor, shard: _Shard) -> tuple[Tensor, Tensor]:
        maximum_T, sums_3T = _reduce(*_local_sums(logits_TV, labels_T, shard), shard.group)
        log_sum_T, mean_T, label_T = sums_3T[0].log(), sums_3T[1] / sums_3T[0], sums_3T[2]
        entropy_T = log_sum_T - mean_T
        log_sum_T += maximum_T
        ctx.shard = shard
        if shard.entropy_has_gradient:
            ctx.save_for_backward(logits_TV, labels_T, log_sum_T, entropy_T)
        else:
            ctx.save_for_backward(logits_TV, labels_T, log_sum_T)
            ctx.mark_non_differentiable(entropy_T)
        return label_T - log_sum_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Gradients over logits, / temperature: of a log-prob 1 at the label - probability; of the entropy -probability * (log
        probability + entropy)."""
        logits_TV, labels_T, log_sum_T, *entropy = ctx.saved_tensors
        shard: _Shard = ctx.shard
        weight_T = gradients[0] / shard.temperature
        columns_T, here_T = shard.local(labels_T)
        gradient_TV = torch.empty_like(logits_TV)
        slope_T = None if not entropy else -gradients[1] / shard.temperature

        def of(shifted: Tensor, rows: Any) -> Tensor:
            """Gradient but for labels, in the place of log-probs of some entries; `rows`: index that gives values of their tokens."""
            if slope_T is None:
                return shifted.exp_().mul_(-weight_T[rows])
            # Log-probs so low that their product with a probability of 0 would not be 0 stand for padding.
            factor = shifted.clamp(min=-1e4).add_(entropy[0][rows]).mul_(slope_T[rows]).sub_(weight_T[rows])
            return shifted.exp_().mul_(factor)

        for tokens, scaled_CV in shard.chunks(logits_TV):
            if scaled_CV is not None:
                of(scaled_CV.sub_(log_sum_T[tokens, None]), (tokens, None))
            left = shard.left(logits_TV, tokens)
            if left is not None:
                if scaled_CV is None:
                    scaled_CV = logits_TV.new_zeros(tokens.stop - tokens.start, logits_TV.shape[1], dtype=weight_T.dtype)
                scaled_CV[left.is_restricted_C] = 0
                rows = left.rows + tokens.start
                scaled_CV[left.rows, left.columns] = of(left.values - log_sum_T[rows], rows)
            assert scaled_CV is not None
            scaled_CV.scatter_add_(1, columns_T[tokens, None], (weight_T * here_T)[tokens, None])
            gradient_TV[tokens] = scaled_CV
        return gradient_TV, None, None


def _local_sums(logits_TV: Tensor, labels_T: Tensor, shard: _Shard) -> tuple[Tensor, Tensor]:
    """Sums of this rank's columns [T]: the maximum m; [3, T]: sum of e = exp(x - m), sum of e (x - m), the label's x or 0."""
    columns_T, here_T = shard.local(labels_T)
    dtype = torch.promote_types(logits_TV.dtype, torch.float32)
    maximum_T = logits_TV.new_empty(len(logits_TV), dtype=dtype)
    sums_3T = logits_TV.new_empty(3, len(logits_TV), dtype=dtype)
    weights = None
    for tokens, scaled_CV in shard.chunks(logits_TV):
        label_C = logits_TV[tokens].gather(1, columns_T[tokens, None])[:, 0].to(dtype) / shard.temperature
        sums_3T[2, tokens] = torch.where(here_T[tokens], label_C, 0.0)
        if scaled_CV is not None:
            scaled_CV.clamp_(min=_floor(dtype))  # logits may be -inf
            maximum_T[tokens] = scaled_CV.amax(-1)
            scaled_CV.sub_(maximum_T[tokens, None])
            weights = torch.empty_like(scaled_CV) if weights is None else weights
            weights_CV = torch.exp(scaled_CV, out=weights[: len(scaled_CV)])
            sums_3T[0, tokens] = weights_CV.sum(-1)
            sums_3T[1, tokens] = scaled_CV.mul_(weights_CV).sum(-1)
        if (left := shard.left(logits_TV, tokens)) is not None:
            largest_C, sums_2C = left.sums()
            maximum_T[tokens] = torch.where(left.is_restricted_C, largest_C, maximum_T[tokens])
            sums_3T[:2, tokens] = torch.where(left.is_restricted_C, sums_2C, sums_3T[:2, tokens])
    return maximum_T, sums_3T


def _reduce(local_maximum_T: Tensor, sums_3T: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """The same over all ranks: sums of different maxima are made relative to the common one before they are added."""
    maximum_T = local_maximum_T.clone()
    dist.all_reduce(maximum_T, op=dist.ReduceOp.MAX, group=group)
    shift_T = local_maximum_T - maximum_T
    sums_3T[1] += shift_T * sums_3T[0]
    sums_3T[:2] *= shift_T.exp()
    dist.all_reduce(sums_3T, group=group)
    return maximum_T, sums_3T
