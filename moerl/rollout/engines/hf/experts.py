"""Layers of experts of transformers models, in tiles of a fixed number of rows.

The usual implementations gather each expert's tokens, so that the shapes of their matrix products, and with them the last bits of a token's
result, depend on where its neighbours were routed. Here every product has TILE_ROWS rows, of one expert, whatever they carry.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

EXPERTS = "moerl_tiles"
"""Name under which `experts_in_tiles` is registered with transformers."""

TILE_ROWS = 32
"""Rows that one call computes at little more than it costs to make; of an expert's last tile half are padding on average."""

_TOKENS = "moerl_tokens"


@dataclass(slots=True)
class PassTokens:
    """Tokens of a pass, of which the layers of experts of a model are told."""

    is_used: np.ndarray | None = None
    """bool [tokens of the pass], False of padding, which no expert sees; None: all are used."""


def register_experts() -> None:
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts_in_tiles)


def share_pass_tokens(model: PreTrainedModel) -> PassTokens:
    """An object that all layers of experts of `model` read."""
    tokens = PassTokens()
    for module in model.modules():
        if hasattr(module, "gate_up_proj"):
            setattr(module, _TOKENS, tokens)
    return tokens


def experts_in_tiles(self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    """Sum of each token's experts, of its weights: [T, hidden] and the router's [T, top_k] indices and weights -> [T, hidden], 0 where a
    token is padding. `self` is the transformers module of fused experts. A token's bits depend on nothing but the token."""
    is_used = getattr(self, _TOKENS, PassTokens()).is_used
    tokens = np.arange(len(hidden_states)) if is_used is None else np.flatnonzero(is_used)
    if not len(tokens):
        return torch.zeros_like(hidden_states)
    experts, rows, places = _tiles(top_k_index.numpy()[tokens], tokens, self.gate_up_proj.shape[0])
    gated = self._apply_gate(_products(self, "gate_up_proj", experts, hidden_states.index_select(0, torch.from_numpy(rows))))
    results = _products(self, "down_proj", experts, gated)
    everyone = len(tokens) == len(hidden_states)
    weights = (top_k_weights if everyone else top_k_weights.index_select(0, torch.from_numpy(tokens))).to(results.dtype)
    summed = results.new_zeros(len(tokens), results.shape[1])
    for nth in range(places.shape[1]):
        summed.addcmul_(results.index_select(0, torch.from_numpy(places[:, nth])), weights[:, nth : nth + 1])
    if everyone:
        return summed
    return torch.zeros_like(hidden_states).index_copy_(0, torch.from_numpy(tokens), summed)


def _tiles(chosen: np.ndarray, tokens: np.ndarray, num_experts: int) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Tiles for `tokens` [n] that chose the experts [n, top_k]: the expert of each tile, the token in each of their rows (the first of all,
    as padding, where there is none), and the row [n, top_k] in which a token meets each of its experts."""
    top_k = chosen.shape[1]
    by_pair = chosen.ravel()
    counts = np.bincount(by_pair, minlength=num_experts)
    num_tiles = -(-counts // TILE_ROWS)
    first_row = (np.cumsum(num_tiles) - num_tiles) * TILE_ROWS
    first_pair = np.cumsum(counts) - counts
    places = np.empty(len(by_pair), dtype=np.int64)
    places[np.argsort(by_pair, kind="stable")] = np.arange(len(by_pair)) + np.repeat(first_row - first_pair, counts)
    rows = np.zeros(int(num_tiles.sum()) * TILE_ROWS, dtype=np.int64)
    rows[places] = np.repeat(tokens, top_k)
    return np.repeat(np.arange(num_experts), num_tiles).tolist(), rows, places.reshape(-1, top_k)


def _products(module: Any, name: str, experts: list[int], rows: torch.Tensor) -> torch.Tensor:
    """Each tile of `rows` by the matrix `name` of its expert."""
    weights = getattr(module, name) if module.is_transposed else getattr(module, name).transpose(1, 2)
    biases = getattr(module, f"{name}_bias") if module.has_bias else None
    out = rows.new_empty(len(rows), weights.shape[2])
    for expert, tile, result in zip(experts, rows.split(TILE_ROWS), out.split(TILE_ROWS), strict=True):
        if biases is None:
            torch.mm(tile, weights[expert], out=result)
        else:
            torch.addmm(biases[expert], tile, weights[expert], out=result)
    return out
