"""Statistics of a loss as sums that ranks and micro-batches add up, and what a step's sums mean."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from moerl.algorithms.columns import TokenColumns
from moerl.algorithms.kl import kl_k3
from moerl.algorithms.kl_formulas import EXPONENT_LIMIT
from moerl.types.stats import MismatchStats, ServerMismatch

SUMMED = (
    "loss", "num_tokens", "entropy", "kl_old", "kl_old_k1", "kl_reference", "clipped", "weight", "bounded", "dropped", "mtp_loss",
    "kl_teacher", "num_taught",
    # Over all that servers sampled, also what a correction dropped: d is trainer - server, rho its exponential.
    "num_sampled", "mismatch", "mismatch_k1", "mismatch_kl", "rho", "rho_squared", "trainer", "server", "trainer_squared",
    "server_squared", "product",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Columns [T] that the loss of the policy's own tokens saw."""

    clipped_T: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    weight_T: Tensor | None = None
    bounded_T: Tensor
    dropped_T: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums:
    """Detached float64 sums over response tokens, in two tensors so that ranks reduce them with one SUM and one MAX."""

    sums: Tensor  # [len(SUMMED) + metrics + 2 * servers], in that order: the objective's, then mismatch and tokens of each server
    mismatch_max: Tensor  # []
    metric_names: tuple[str, ...] = ()

    @classmethod
    def zero(cls, device: torch.device | str, num_servers: int = 0, metric_names: tuple[str, ...] = ()) -> "LossSums":
        return cls(
            sums=torch.zeros(len(SUMMED) + len(metric_names) + 2 * num_servers, dtype=torch.float64, device=device),
            mismatch_max=torch.zeros((), dtype=torch.float64, device=device),
            metric_names=metric_names,
        )

    @classmethod
    def of_means(cls, named: Mapping[str, Tensor], metrics: Mapping[str, Tensor]) -> "LossSums":
        """Some of SUMMED, the others 0, and sums of metrics whose means over tokens are told."""
        device = next(iter(named.values())).device
        nothing = torch.zeros((), dtype=torch.float64, device=device)
        columns = [named.get(name, nothing) for name in SUMMED] + list(metrics.values())
        return cls(sums=torch.stack(columns), mismatch_max=nothing, metric_names=tuple(metrics))

    @property
    def loss(self) -> float:
        return float(self.sums[SUMMED.index("loss")])

    def by_name(self) -> dict[str, float]:
        return dict(zip(SUMMED, self.sums.tolist(), strict=False))

    def metrics(self) -> dict[str, float]:
        values = self.sums[len(SUMMED) : len(SUMMED) + len(self.metric_names)]
        return dict(zip(self.metric_names, values.tolist(), strict=True))

    def server_mismatch(self) -> tuple[ServerMismatch, ...]:
        pairs = self.sums[len(SUMMED) + len(self.metric_names) :].view(-1, 2).tolist()
        return tuple(ServerMismatch(mean=total / max(num_tokens, 1), num_tokens=round(num_tokens)) for total, num_tokens in pairs)

    def with_mtp(self, mtp_loss: Tensor) -> "LossSums":
        """With this micro-batch's share of the loss of multi-token prediction, before its coefficient."""
        sums = self.sums.clone()
        sums[SUMMED.index("mtp_loss")] = mtp_loss.detach()
        return replace(self, sums=sums)

    def __add__(self, other: "LossSums") -> "LossSums":
        return replace(self, sums=self.sums + other.sums, mismatch_max=torch.maximum(self.mismatch_max, other.mismatch_max))


def observed_sums(
    loss: Tensor, tokens: TokenColumns, seen: Observed, sampled_T: Tensor, *, logp_T: Tensor, rollout_T: Tensor, entropy_T: Tensor,
    metric_names: tuple[str, ...], server_T: Tensor | None, num_servers: int, distance_T: Tensor | None = None,
    taught_T: Tensor | None = None,
) -> LossSums:  # fmt: skip
    """Sums of a micro-batch. Columns of `tokens` are 0 outside its mask, `logp_T` and `rollout_T` outside `sampled_T`, where every
    estimator is 0 as well. `distance_T`: log-prob - teacher's of the tokens `taught_T`, 0 elsewhere."""
    policy_T, old_T, mask_T = tokens.logp_T.double(), tokens.old_logp_T.double(), tokens.mask_T
    logp_T, rollout_T, reference_T = logp_T.double(), rollout_T.double(), tokens.reference_logp_T
    rho_T = torch.where(sampled_T, (logp_T - rollout_T).clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp(), 0.0)
    mismatch_T = (logp_T - rollout_T).abs()
    nothing = loss.new_zeros((), dtype=torch.float64)
    by_name = {
        "loss": loss.double(),
        "num_tokens": mask_T.double().sum(),
        "entropy": entropy_T.double().sum(),
        "kl_old": kl_k3(old_T, policy_T).sum(),
        "kl_old_k1": (old_T - policy_T).sum(),
        "kl_reference": nothing if reference_T is None else kl_k3(tokens.whole_logp_T.double(), reference_T.double()).sum(),
        "clipped": (seen.clipped_T & mask_T).double().sum(),
        "weight": mask_T.double().sum() if seen.weight_T is None else torch.where(mask_T, seen.weight_T.double(), 0.0).sum(),
        "bounded": (seen.bounded_T & sampled_T).double().sum(),
        "dropped": nothing if seen.dropped_T is None else (seen.dropped_T & sampled_T).double().sum(),
        "kl_teacher": nothing if distance_T is None else distance_T.double().sum(),
        "num_taught": nothing if taught_T is None else taught_T.double().sum(),
        "num_sampled": sampled_T.double().sum(),
        "mismatch": mismatch_T.sum(),
        "mismatch_k1": (rollout_T - logp_T).sum(),
        "mismatch_kl": kl_k3(rollout_T, logp_T).sum(),
        "rho": rho_T.sum(),
        "rho_squared": (rho_T**2).sum(),
        "trainer": logp_T.sum(),
        "server": rollout_T.sum(),
        "trainer_squared": (logp_T**2).sum(),
        "server_squared": (rollout_T**2).sum(),
        "product": (logp_T * rollout_T).sum(),
    }
    metrics = {
        name: torch.where(mask_T, seen.metrics[name].detach().double(), 0.0).sum() if name in seen.metrics else nothing
        for name in metric_names
    }
    found = LossSums.of_means(by_name, metrics)
    servers = _by_server(mismatch_T, server_T, num_servers)
    return replace(found, sums=torch.cat([found.sums, servers.flatten()]), mismatch_max=mismatch_T.max())


def _by_server(mismatch_T: Tensor, server_T: Tensor | None, num_servers: int) -> Tensor:
    """float64 [num_servers, 2]: sum of the mismatch and number of the tokens that each sampled."""
    totals = mismatch_T.new_zeros((num_servers + 1, 2))
    if server_T is None:
        return totals[1:]
    return totals.index_add_(0, server_T.long() + 1, torch.stack([mismatch_T, torch.ones_like(mismatch_T)], dim=1))[1:]


def step_statistics(mini_batches: Sequence[LossSums], *, uses_reference: bool, trains_mtp: bool) -> dict[str, Any]:
    """Fields of StepStats from the sums of each mini-batch of a step, in order, reduced over every rank.

    loss, mtp_loss: mean over the mini-batches. first_kl_old and the mismatch: the first mini-batch, before the policy moved. kl_teacher:
    the first with taught tokens. kl_reference: None without a reference. The rest: token means over the step.
    """
    per_batch = [batch.by_name() for batch in mini_batches]
    first = per_batch[0]
    taught = next((batch for batch in per_batch if batch["num_taught"]), None)
    num_tokens = sum(batch["num_tokens"] for batch in per_batch)

    def mean(name: str, count: str = "num_tokens") -> float:
        return sum(batch[name] for batch in per_batch) / max(sum(batch[count] for batch in per_batch), 1)

    def first_mean(name: str, count: str = "num_sampled") -> float:
        return first[name] / max(first[count], 1)

    return {
        "loss": sum(batch["loss"] for batch in per_batch) / len(per_batch),
        "num_tokens": round(num_tokens),
        "entropy": mean("entropy"),
        "kl_old": mean("kl_old"),
        "kl_old_k1": mean("kl_old_k1"),
        "first_kl_old": first_mean("kl_old", "num_tokens"),
        "kl_reference": mean("kl_reference") if uses_reference else None,
        "clip_fraction": mean("clipped"),
        "correction_weight": mean("weight"),
        "correction_bounded": mean("bounded", "num_sampled"),
        "correction_dropped": mean("dropped", "num_sampled"),
        "num_compared": round(first["num_sampled"]),
        "mismatch_mean": first_mean("mismatch"),
        "mismatch_max": float(mini_batches[0].mismatch_max),
        "mismatch_kl": first_mean("mismatch_kl"),
        "mismatch": _mismatch(first_mean),
        "mtp_loss": sum(batch["mtp_loss"] for batch in per_batch) / len(per_batch) if trains_mtp else None,
        "kl_teacher": None if taught is None else taught["kl_teacher"] / taught["num_taught"],
        "objective": {
            name: sum(batch.metrics()[name] for batch in mini_batches) / max(num_tokens, 1) for name in mini_batches[0].metric_names
        },
    }


def _mismatch(mean: Any) -> MismatchStats:
    variances = (mean("trainer_squared") - mean("trainer") ** 2) * (mean("server_squared") - mean("server") ** 2)
    covariance = mean("product") - mean("trainer") * mean("server")
    return MismatchStats(
        k1=mean("mismatch_k1"),
        chi2=mean("rho_squared") - 1,
        effective=mean("rho") ** 2 / max(mean("rho_squared"), 1e-300),
        trainer_perplexity=_exponential(-mean("trainer")),
        server_perplexity=_exponential(-mean("server")),
        correlation=covariance / variances**0.5 if variances > 1e-24 else 1.0,
    )


def _exponential(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float64).clamp(max=100).exp())
