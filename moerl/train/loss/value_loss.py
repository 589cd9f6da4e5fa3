"""The loss of a critic: half the squared distance of its values from the returns, a mean over the response tokens of a mini-batch.

Values stand where log-probs do: that of a token is predicted from the tokens before it.
"""

import torch
from torch import Tensor

from moerl.algorithms.mini_batch_loss import ValueLossSettings
from moerl.train.batching.packed_sequences import PackedMicroBatch
from moerl.train.loss.batch_loss import Denominators, at_least_float32
from moerl.train.loss.loss_sums import LossSums


def value_loss(values_T: Tensor, micro: PackedMicroBatch, loss: ValueLossSettings, denominators: Denominators) -> tuple[Tensor, LossSums]:
    """This micro-batch's share of the mini-batch loss, with gradient, and its sums. `values_T` [T] at label positions."""
    assert micro.values_T is not None and micro.returns_T is not None, "a critic's update needs its values and the returns"
    device = values_T.device
    mask_T = torch.from_numpy(micro.response_mask_T).to(device)
    values_T = torch.where(mask_T, at_least_float32(values_T), 0.0)
    old_T, returns_T = (
        torch.where(mask_T, torch.from_numpy(column).to(device, values_T.dtype), 0.0) for column in (micro.values_T, micro.returns_T)
    )
    loss_T, clipped_T = _of_tokens(loss, values_T, old_T, returns_T)
    total = torch.where(mask_T, loss_T, 0.0).sum() / max(denominators.num_tokens, 1)
    with torch.no_grad():
        wide_T, wide_returns_T = values_T.double(), returns_T.double()
        metrics = (wide_T, wide_returns_T, wide_returns_T**2, (wide_T - wide_returns_T) ** 2, (clipped_T & mask_T).double())
        sums = LossSums.of_means(
            {"loss": total.double(), "num_tokens": mask_T.double().sum()},
            {name: column.sum() for name, column in zip(loss.metric_names, metrics, strict=True)},
        )
    return total, sums


def _of_tokens(loss: ValueLossSettings, values_T: Tensor, old_T: Tensor, returns_T: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of each token, and whether the clip keeps it from the value."""
    error_T = (values_T - returns_T) ** 2
    if loss.clip is None:
        return error_T / 2, torch.zeros_like(error_T, dtype=torch.bool)
    clipped_T = (old_T + (values_T - old_T).clamp(-loss.clip, loss.clip) - returns_T) ** 2
    return torch.maximum(error_T, clipped_T) / 2, clipped_T > error_T
