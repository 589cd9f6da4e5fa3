"""A critic's last layer: one number for a hidden state, in the place of GPTModel's output layer."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from moerl.models.hf_checkpoint import HFCheckpoint
from moerl.train.loss.batch_loss import at_least_float32
from moerl.types.errors import CheckpointError

SCORE = "score.weight"
"""Name that transformers' models of sequence classification give it [1, hidden]."""


class ValueHead(nn.Module):
    """Begins at 0, so that values are 0 at first, under every layout."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        weight = torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight = nn.Parameter(weight)
        # Of ranks that share a sequence each sees its part of the tokens: Megatron then adds up their gradients.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.sequence_parallel = config.sequence_parallel

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        """[T / tp, 1, H] -> [T, 1, 1] in at least float32, on every rank."""
        values = nn.functional.linear(at_least_float32(hidden_states), at_least_float32(self.weight))
        if self.sequence_parallel:
            # Every rank computes the same loss: the gradient is not added up over them, but cut.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


@torch.no_grad()
def load_head(chunks: Sequence[nn.Module], checkpoint: HFCheckpoint) -> None:
    """From a checkpoint that has one; else it stays as it begins. CheckpointError for one of another form."""
    heads = [module for chunk in chunks for module in chunk.modules() if isinstance(module, ValueHead)]
    names = set(checkpoint.names())
    if not heads or SCORE not in names:
        return
    score, bias = checkpoint.read(SCORE), "score.bias"
    if score.shape != heads[0].weight.shape or bias in names:
        found = f"{list(score.shape)}{' and a bias' if bias in names else ''}"
        raise CheckpointError(f"{SCORE} has shape {found}: a critic's head is one row of {heads[0].weight.shape[1]}, without a bias")
    for head in heads:
        head.weight.copy_(score)
