"""Megatron's GPTModel with its multi-token prediction block, returning the logits of every depth instead of a loss.

Megatron's own forward computes the loss of multi-token prediction inside the model: it needs labels, which RL does not give it,
and it divides by counts of one rank and one micro-batch. Here the loss is made where every other loss is (moerl/train/loss/batch_loss.py).
"""

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor


class MTPModel(GPTModel):
    def _postprocess(self, hidden_states: Tensor, input_ids: Tensor, position_ids: Tensor, **inputs: Any) -> Tensor | tuple[Tensor, ...]:
        """On the last stage [1, T, V / tp]: the logits; where gradients are wanted a tuple of them and of those of each depth in order."""
        if not self.post_process:
            return hidden_states
        hidden = [hidden_states]
        if torch.is_grad_enabled():
            stacked = self.mtp(
                input_ids=input_ids,
                position_ids=position_ids,
                hidden_states=hidden_states,
                embedding=self.embedding,
                **{name: inputs[name] for name in ("attention_mask", "rotary_pos_emb", "packed_seq_params")},
            )
            hidden = list(torch.chunk(stacked, 1 + self.config.mtp_num_layers))
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits = tuple(self.output_layer(states, weight=weight)[0].transpose(0, 1).contiguous() for states in hidden)
        return logits if len(logits) > 1 else logits[0]
