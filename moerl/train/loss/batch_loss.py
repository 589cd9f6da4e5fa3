"""The one place that masks, sums and scales a loss. Algorithms return per-token losses; nothing else divides.

Invariants, by the names of their tests:
* plain_sums: the contributions of all micro-batches and ranks add up to the loss of the mini-batch; no further division.
* split_free: loss, gradient and statistics do not depend on micro-batches, packing order, padding or a cut inside a sequence.
* masked_values: whatever stands outside the response mask, NaN and inf included, changes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from moerl.algorithms.objective import NormalizeBy, Objective
from moerl.algorithms.token_losses import kl_k3
from moerl.train.batching.packing import PackedMicroBatch
from moerl.types.stats import ServerMismatch
from moerl.types.stored_batch import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    """Counts of one whole mini-batch, over every micro-batch and data-parallel rank."""

    num_tokens: int
    """Response tokens."""
    num_sequences: int
    """Sequences with at least one response token."""
    num_servers: int = 0
    """Servers whose tokens are compared."""

    @classmethod
    def of(cls, mini_batch: Batch) -> "Denominators":
        lengths = mini_batch.response_lengths
        return cls(num_tokens=int(lengths.sum()), num_sequences=int((lengths > 0).sum()), num_servers=mini_batch.num_servers)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossColumns:
    """Columns that the loss needs about each label position, on the device of the log-probs. See `PackedMicroBatch`."""

    response_mask_T: Tensor  # bool
    response_tokens_T: Tensor  # int64
    rollout_logprobs_T: Tensor  # float32
    advantages_T: Tensor  # float32
    old_logprobs_T: Tensor | None = None  # float32; None: the old policy is the policy itself
    reference_logprobs_T: Tensor | None = None  # float32
    server_T: Tensor | None = None  # int16

    @classmethod
    def of(cls, packed: PackedMicroBatch, *, device: torch.device | str) -> "LossColumns":
        def place(array: np.ndarray | None) -> Tensor | None:
            return None if array is None else torch.from_numpy(array).to(device)

        return cls(**{column.name: place(getattr(packed, column.name)) for column in fields(cls)})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums:
    """Detached float64 sums over response tokens, in two tensors so that ranks reduce them with one SUM and one MAX."""

    sums: Tensor  # [len(SUMMED) + 2 * num_servers], in that order, then the mismatch and the tokens of each server
    mismatch_max: Tensor  # []

    @classmethod
    def zero(cls, device: torch.device | str, num_servers: int = 0) -> "LossSums":
        return cls(
            sums=torch.zeros(len(SUMMED) + 2 * num_servers, dtype=torch.float64, device=device),
            mismatch_max=torch.zeros((), dtype=torch.float64, device=device),
        )

    @property
    def loss(self) -> float:
        return float(self.sums[SUMMED.index("loss")])

    def server_mismatch(self) -> tuple[ServerMismatch, ...]:
        pairs = self.sums[len(SUMMED) :].view(-1, 2).tolist()
        return tuple(ServerMismatch(mean=total / max(num_tokens, 1), num_tokens=round(num_tokens)) for total, num_tokens in pairs)

    def with_mtp(self, mtp_loss: Tensor) -> "LossSums":
        """With this micro-batch's share of the loss of multi-token prediction, before its coefficient."""
        sums = self.sums.clone()
        sums[SUMMED.index("mtp_loss")] = mtp_loss.detach()
        return LossSums(sums=sums, mismatch_max=self.mismatch_max)

    def __add__(self, other: "LossSums") -> "LossSums":
        return LossSums(sums=self.sums + other.sums, mismatch_max=torch.maximum(self.mismatch_max, other.mismatch_max))


SUMMED = ("loss", "num_tokens", "entropy", "kl_old", "kl_reference", "clipped", "mismatch", "mismatch_kl", "mtp_loss")


def micro_batch_loss(
    logp_T: Tensor, entropy_T: Tensor, columns: LossColumns, objective: Objective, denominators: Denominators
) -> tuple[Tensor, LossSums]:
    """This micro-batch's share of the mini-batch loss, with gradient, and its statistics.

    `logp_T`, `entropy_T` [T]: the trainer's values at every label position. A micro-batch of padding alone gives a 0 that still
    has a gradient path, so that every rank runs the same backward collectives.
    """
    mask_T = columns.response_mask_T
    # Masked before any arithmetic: the gradient of torch.where is 0 there, while NaN * 0 would be NaN.
    logp_T = torch.where(mask_T, at_least_float32(logp_T), 0.0)
    rollout_T, advantage_T = _masked(columns.rollout_logprobs_T, mask_T), _masked(columns.advantages_T, mask_T)
    old_T = logp_T.detach() if columns.old_logprobs_T is None else _masked(columns.old_logprobs_T, mask_T)
    reference_T = None if columns.reference_logprobs_T is None else _masked(columns.reference_logprobs_T, mask_T)

    token_loss_T, clipped_T = objective.token_loss(logp_T, old_T, advantage_T, reference_T)
    weight_T = _token_weights(columns.response_tokens_T.to(logp_T.dtype), objective.normalize_by, denominators)
    loss = torch.where(mask_T, token_loss_T * weight_T, 0.0).sum()
    with torch.no_grad():
        sums = _sums(mask_T, loss, logp_T, _masked(entropy_T, mask_T), old_T, reference_T, rollout_T, clipped_T)
        by_server = _by_server((logp_T.double() - rollout_T.double()).abs(), columns.server_T, denominators.num_servers)
    return loss, replace(sums, sums=torch.cat([sums.sums, by_server.flatten()]))


def step_statistics(mini_batches: Sequence[LossSums], *, uses_reference: bool, trains_mtp: bool) -> dict[str, float | int | None]:
    """Fields of StepStats from the sums of each mini-batch of a step, in order, reduced over every rank.

    loss, mtp_loss: mean over the mini-batches. kl_old and the mismatch: the first mini-batch, before the policy moved. kl_reference: None
    without a reference. The rest: token means over the step.
    """
    per_batch = [dict(zip(SUMMED, batch.sums.tolist(), strict=False)) for batch in mini_batches]
    first = per_batch[0]
    num_tokens = sum(batch["num_tokens"] for batch in per_batch)

    def mean(name: str) -> float:
        return sum(batch[name] for batch in per_batch) / max(num_tokens, 1)

    def first_mean(name: str) -> float:
        return first[name] / max(first["num_tokens"], 1)

    return {
        "loss": sum(batch["loss"] for batch in per_batch) / len(per_batch),
        "num_tokens": round(num_tokens),
        "entropy": mean("entropy"),
        "kl_old": first_mean("kl_old"),
        "kl_reference": mean("kl_reference") if uses_reference else None,
        "clip_fraction": mean("clipped"),
        "mismatch_mean": first_mean("mismatch"),
        "mismatch_max": float(mini_batches[0].mismatch_max),
        "mismatch_kl": first_mean("mismatch_kl"),
        "mtp_loss": sum(batch["mtp_loss"] for batch in per_batch) / len(per_batch) if trains_mtp else None,
    }


def at_least_float32(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def _masked(values_T: Tensor, mask_T: Tensor) -> Tensor:
    return torch.where(mask_T, at_least_float32(values_T.detach()), 0.0)


def _token_weights(response_tokens_T: Tensor, normalize_by: NormalizeBy, denominators: Denominators) -> Tensor | float:
    """Weights by which a response token's loss is multiplied, in their own dtype. Counts of 0 occur only where there is nothing to
    weigh."""
    if normalize_by == "token":
        return 1.0 / max(denominators.num_tokens, 1)
    return 1.0 / (response_tokens_T.clamp(min=1) * max(denominators.num_sequences, 1))


def _by_server(mismatch_T: Tensor, server_T: Tensor | None, num_servers: int) -> Tensor:
    """float64 [num_servers, 2]: sum of the mismatch and number of the tokens that each sampled."""
    totals = mismatch_T.new_zeros((num_servers + 1, 2))
    if server_T is None:
        return totals[1:]
    return totals.index_add_(0, server_T.long() + 1, torch.stack([mismatch_T, torch.ones_like(mismatch_T)], dim=1))[1:]


def _sums(
    mask_T: Tensor, loss: Tensor, logp_T: Tensor, entropy_T: Tensor, old_T: Tensor, reference_T: Tensor | None, rollout_T: Tensor,
    clipped_T: Tensor,
) -> LossSums:  # fmt: skip
    """All inputs are 0 outside the mask, where every estimator is 0 as well."""
    logp_T, old_T, rollout_T = logp_T.double(), old_T.double(), rollout_T.double()
    mismatch_T = (logp_T - rollout_T).abs()
    by_name = {
        "loss": loss.double(),
        "num_tokens": mask_T.double().sum(),
        "entropy": entropy_T.double().sum(),
        "kl_old": kl_k3(logp_T, old_T).sum(),
        "kl_reference": loss.new_zeros((), dtype=torch.float64) if reference_T is None else kl_k3(logp_T, reference_T.double()).sum(),
        "clipped": (clipped_T & mask_T).double().sum(),
        "mismatch": mismatch_T.sum(),
        "mismatch_kl": kl_k3(rollout_T, logp_T).sum(),
        "mtp_loss": loss.new_zeros((), dtype=torch.float64),
    }
    return LossSums(sums=torch.stack([by_name[name] for name in SUMMED]), mismatch_max=mismatch_T.max())
