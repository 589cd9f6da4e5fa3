"""Log-probs and entropy of vocabulary-parallel logits."""

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region, vocab_parallel_cross_entropy
from torch import Tensor

from moerl.train.loss import at_least_float32


def logprobs_and_entropy(
    logits_TV: Tensor, labels_T: Tensor, *, temperature: float, vocab_size: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """float32 [T] log-prob of each label, with gradient, and entropy in nats, without; both of softmax(logits / temperature).

    `logits_TV` [T, V / tp] is this rank's slice of the padded vocabulary; entries from `vocab_size` on have probability 0.
    """
    scaled_TV = at_least_float32(logits_TV) / temperature
    first = group.rank() * scaled_TV.shape[1]
    padding_V = torch.arange(first, first + scaled_TV.shape[1], device=scaled_TV.device) >= vocab_size
    if bool(padding_V.any()):
        scaled_TV = scaled_TV.masked_fill(padding_V, torch.finfo(scaled_TV.dtype).min / 2)
    entropy_T = _entropy(scaled_TV.detach(), group)
    if scaled_TV.dtype == torch.float64:  # Megatron's function computes in float32
        return gather_from_tensor_model_parallel_region(scaled_TV).log_softmax(-1).gather(1, labels_T[:, None])[:, 0], entropy_T
    # Megatron's function works in place on its argument; `scaled_TV` is ours.
    return -vocab_parallel_cross_entropy(scaled_TV[:, None].contiguous(), labels_T[:, None])[:, 0], entropy_T


@torch.no_grad()
def _entropy(logits_TV: Tensor, group: dist.ProcessGroup) -> Tensor:
    """log Z - E[logit], shifted by the maximum."""
    maximum_T = logits_TV.max(dim=-1).values
    dist.all_reduce(maximum_T, op=dist.ReduceOp.MAX, group=group)
    shifted_TV = logits_TV - maximum_T[:, None]
    weights_TV = shifted_TV.exp()
    sums_2T = torch.stack([weights_TV.sum(-1), (weights_TV * shifted_TV).sum(-1)])
    dist.all_reduce(sums_2T, group=group)
    return sums_2T[0].log() - sums_2T[1] / sums_2T[0]
