"""Routers of transformers models: what they choose, and made to choose what they are told. For comparisons with the engine."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moerl.types.batch import TrainBatch


def gates(model: Any) -> list[Any]:
    return [module for name, module in model.named_modules() if name.endswith(".mlp.gate")]


@contextmanager
def following(model: Any, routes: np.ndarray | None) -> Iterator[None]:
    """Inside, the tokens of the one sequence that runs go to `routes` [T, layers, top_k], and as usual where these are unknown."""
    if routes is None:
        yield
        return
    told = torch.from_numpy(routes.astype(np.int64))
    is_known = told != np.iinfo(routes.dtype).max
    given = [gate.forward for gate in gates(model)]
    for layer, gate in enumerate(gates(model)):
        gate.forward = _follower(gate, told[:, layer], is_known[:, layer])
    try:
        yield
    finally:
        for gate, forward in zip(gates(model), given, strict=True):
            gate.forward = forward


def _follower(gate: Any, told: Tensor, is_known: Tensor) -> Any:
    usual = gate.forward

    def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = hidden.reshape(-1, hidden.shape[-1])
        _, _, own = usual(hidden)
        chosen = torch.where(is_known, told, own)
        logits = F.linear(hidden, gate.weight)
        is_sigmoid = hasattr(gate, "e_score_correction_bias")
        weights = (logits.sigmoid() if is_sigmoid else logits.softmax(-1)).gather(1, chosen)
        if gate.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights * getattr(gate, "routed_scaling_factor", 1.0), chosen

    return forward


@torch.no_grad()
def own_routes(model: Any, batch: TrainBatch) -> np.ndarray:
    """uint8 [T, layers, top_k] that the model chooses, sequence by sequence."""
    chosen: list[list[Tensor]] = [[] for _ in gates(model)]
    hooks = [
        gate.register_forward_hook(lambda _, __, output, kept=kept: kept.append(output[2]))
        for gate, kept in zip(gates(model), chosen, strict=True)
    ]
    for start, end in pairwise(batch.offsets):
        model(input_ids=torch.from_numpy(batch.token_ids_T[start:end])[None])
    for hook in hooks:
        hook.remove()
    return torch.stack([torch.cat(kept) for kept in chosen], dim=1).numpy().astype(np.uint8)


def random_routes(batch: TrainBatch, *, num_layers: int, top_k: int, num_experts: int) -> np.ndarray:
    """uint8 [T, layers, top_k] of different experts, unknown for the last token of a sequence and for some others."""
    rng = np.random.default_rng(5)
    shape = (len(batch.token_ids_T), num_layers, num_experts)
    routes = np.argsort(rng.random(shape), axis=-1)[..., :top_k].astype(np.uint8)
    routes[batch.offsets[1:] - 1] = 255
    routes[rng.random(len(routes)) < 0.1] = 255
    return routes


# -- load-balancing losses -----------------------------------------------------------------------------------------


def router_logits(model: Any, batch: TrainBatch) -> list[list[Tensor]]:
    """[T, experts], with gradient, of each sequence, for each layer with experts. One sequence after the other, so nothing is padded."""
    kept: list[list[Tensor]] = [[] for _ in gates(model)]
    hooks = [
        gate.register_forward_hook(lambda _, __, output, mine=mine: mine.append(output[0]))
        for gate, mine in zip(gates(model), kept, strict=True)
    ]
    for start, end in pairwise(batch.offsets):
        model(input_ids=torch.from_numpy(batch.token_ids_T[start:end])[None])
    for hook in hooks:
        hook.remove()
    return kept


def z_loss(micro_batches: Sequence[Tensor]) -> Tensor:
    """Of the router logits [T, experts] of each micro-batch. ST-MoE (arXiv:2202.08906), equation 5: the mean over tokens."""
    return torch.cat(list(micro_batches)).logsumexp(-1).square().mean()


def aux_loss(micro_batches: Sequence[Tensor], *, top_k: int, is_sigmoid: bool) -> Tensor:
    """Switch Transformers (arXiv:2101.03961), equation 4, of each micro-batch; their mean, weighted by tokens."""
    total, count = torch.zeros(()), sum(map(len, micro_batches))
    for logits in micro_batches:
        scores = F.normalize(logits.sigmoid(), p=1, dim=-1) if is_sigmoid else logits.softmax(-1)
        share_E = torch.zeros_like(scores).scatter(1, scores.topk(top_k).indices, 1).mean(0) / top_k
        total = total + len(logits) / count * scores.shape[1] * (share_E * scores.mean(0)).sum()
    return total
