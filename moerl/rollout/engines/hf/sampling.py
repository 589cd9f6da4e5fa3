"""Tokens and log-probs from logits. A token depends on its row's logits, settings and uniform only, so neighbours cannot change it."""

from dataclasses import dataclass

import numpy as np
import torch

from moerl.types.kept_vocabulary import KeptVocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """Settings by which each of n rows is sampled, as in SamplingParams."""

    temperature: np.ndarray  # float64 [n]
    top_k: np.ndarray  # int64 [n]
    top_p: np.ndarray  # float64 [n]
    filtered: np.ndarray  # bool [n]
    uniform: np.ndarray  # float64 [n], in [0, 1)


def uniforms(seed: int, count: int) -> np.ndarray:
    """float64 [count] in [0, 1). Element p depends on `seed` and p only."""
    return np.random.Generator(np.random.Philox(key=seed)).random(count)


@torch.inference_mode()
def sample(logits: torch.Tensor, draws: Draws) -> tuple[np.ndarray, np.ndarray, KeptVocabulary | None]:
    """int64 [n] tokens and float64 [n] log-probs of softmax(logits / temperature), before top-k and top-p or, of `filtered` rows, after
    them; temperature 0: the largest. Of these rows also the entries that were left; None if there is no such row."""
    greedy = torch.from_numpy(draws.temperature == 0)
    temperature = torch.from_numpy(np.where(draws.temperature == 0, 1.0, draws.temperature)).float()
    logprobs = torch.log_softmax(logits.float() / temperature[:, None], dim=-1)
    probabilities = logprobs.double().exp_()
    if draws.top_k.any() or (draws.top_p < 1).any():
        probabilities = _restrict(probabilities, draws)
    tokens = torch.where(greedy, logprobs.argmax(dim=-1), _inverse_cdf(probabilities, torch.from_numpy(draws.uniform)))
    sets = None
    if draws.filtered.any():
        filtered = torch.from_numpy(draws.filtered)
        left = (probabilities > 0) & filtered[:, None]
        sets = KeptVocabulary.of_counts(left.nonzero()[:, 1].numpy(), left.sum(dim=-1).numpy())
        # From the logits anew: a difference of log-probs would round twice.
        scaled = (logits.float() / temperature[:, None]).masked_fill(~left & filtered[:, None], -torch.inf)
        logprobs = torch.where(filtered[:, None], torch.log_softmax(scaled, dim=-1), logprobs)
    return tokens.numpy(), logprobs.gather(1, tokens[:, None])[:, 0].double().numpy(), sets


def _inverse_cdf(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulative weight exceeds uniform * total: never one of weight 0. Any token where weights are no numbers."""
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1]
    below_total = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(uniform * total, below_total)
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0].clamp_(max=weights.shape[-1] - 1)


def _restrict(probabilities: torch.Tensor, draws: Draws) -> torch.Tensor:
    """0 outside the top k tokens and outside the smallest set of top tokens that holds top_p, which has at least one."""
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    vocab = probabilities.shape[-1]
    top_k = torch.from_numpy(np.where(draws.top_k == 0, vocab, draws.top_k))
    keep = torch.arange(vocab) < top_k[:, None]
    keep &= (before < torch.from_numpy(draws.top_p)[:, None]) | torch.from_numpy(draws.top_p == 1)[:, None]
    keep[:, 0] = True
    return torch.zeros_like(probabilities).scatter_(1, order, ordered * keep)
