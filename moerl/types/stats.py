"""Numbers that a trainer reports: of an update, of memory, of routes, of a checkpoint."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStats:
    """Where a rank's memory was; the driver keeps that of the rank which holds most.

    Kinds and states are those of moerl/train/memory/memory_states.py.
    """

    device_bytes: dict[str, dict[str, int]]
    """state -> kind -> bytes on the device when the trainer was last in that state."""
    host_bytes: dict[str, int]
    """kind -> bytes of copies in host memory."""
    transition_seconds: dict[str, float]
    """"asleep_to_scoring" and so on -> seconds since the update before this one."""
    peaks: dict[str, int] = field(default_factory=dict)
    """Bytes in the update: allocated, reserved and used on the GPU, where there is one; of the rank's process in host memory."""

    def most(self) -> int:
        """Bytes on the device in the state that has most there."""
        return max(sum(kinds.values()) for kinds in self.device_bytes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Move of memory to or from GPUs that trainer and servers share; what several moves took, where they have one name."""

    seconds: float
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingStats:
    """Where an update's tokens went, padding left out; the tuples have an entry per layer with experts."""

    layers: tuple[int, ...]
    """Their numbers in the model, from 0."""
    load_max: tuple[float, ...]
    """Load of the busiest expert: its share of the layer's routes * experts - 1."""
    load_min: tuple[float, ...]
    """The same of the idlest; -1: it got no token."""
    load_mean: tuple[float, ...]
    """Mean over experts of the absolute value (the mean itself is always 0)."""
    dead_experts: tuple[int, ...]
    """Experts without a token."""
    replayed: float | None = None
    """Share of the routes that were replayed; None without replay."""
    overlap: tuple[float, ...] | None = None
    """Share of the replayed routes whose set of experts the router would have chosen itself, given what came before it."""


MIN_COMPARED = 32
"""Tokens below which a server's mean mismatch is not judged: single tokens of low precision differ by more than a mean may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerMismatch:
    """Mismatch of the tokens that one server sampled with the weights from which the update started."""

    mean: float
    """mean |d|; 0 without tokens."""
    num_tokens: int


def disagreeing(mismatches: Sequence[ServerMismatch], limit: float) -> tuple[int, ...]:
    """Numbers of the servers whose mean is above `limit` (or no number), of those with enough tokens. A mean of n tokens may exceed it by
    8 / sqrt(n) of it: thousands of servers and steps are judged, and those of low precision have tails."""
    return tuple(
        number
        for number, each in enumerate(mismatches)
        if each.num_tokens >= MIN_COMPARED and not each.mean <= limit * (1 + 8 / math.sqrt(each.num_tokens))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchStats:
    """Trainer against server over the tokens that servers sampled; d is trainer minus server log-prob, rho its exponential."""

    k1: float
    """mean(-d), the k1 estimate of KL(server || trainer)."""
    chi2: float
    """mean(rho^2) - 1"""
    effective: float
    """Share of the samples that count in effect: 1 / mean((rho / mean rho)^2)."""
    trainer_perplexity: float
    """exp(-mean log-prob)"""
    server_perplexity: float
    correlation: float
    """Pearson's, of the log-probs; 1 where they do not vary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """Measurements of one `TrainGroup.update`, reduced over every rank. `d` is trainer minus rollout log-prob of a token."""

    loss: float
    grad_norm: float
    """Global, before clipping; the largest of the mini-batches."""
    learning_rate: float
    num_tokens: int
    """Response tokens trained on."""
    entropy: float
    """Mean over response tokens, in nats."""
    kl_old: float
    """k3 estimate of KL(old policy || policy)"""
    kl_reference: float | None
    """k3 estimate of KL(policy || reference); None without a reference."""
    clip_fraction: float
    mismatch_mean: float
    """mean |d|"""
    mismatch_max: float
    """max |d|"""
    mismatch_kl: float
    """k3 estimate of KL(rollout || trainer): mean(exp(d) - d - 1)"""
    padding_fraction: float
    """Share of the micro-batch tokens that are padding."""
    rank_imbalance: float
    """Work of the busiest data-parallel rank divided by the mean over ranks; attention's quadratic cost included."""
    round_imbalance: float
    """The same if ranks wait for each other after every micro-batch, as they do when they share experts; never less."""
    num_compared: int = field(default=0, compare=False)
    """Tokens that the mismatch is of: those that servers sampled of the first mini-batch."""
    kl_old_k1: float = field(default=0.0, compare=False)
    """k1 estimate of KL(old policy || policy)"""
    first_kl_old: float = field(default=0.0, compare=False)
    """kl_old of the first mini-batch; exactly 0 when the old log-probs are the trainer's own."""
    kl_coefficient: float | None = field(default=None, compare=False)
    """Coefficient of an adaptive KL; None: it is that of the settings."""
    mismatch: MismatchStats | None = field(default=None, compare=False)
    correction_weight: float = field(default=1.0, compare=False)
    """Mean factor that corrections gave the policy loss of a token."""
    correction_bounded: float = field(default=0.0, compare=False)
    """Share of tokens at a bound of a correction, dropped ones included."""
    correction_dropped: float = field(default=0.0, compare=False)
    """Share of tokens that a correction took out."""
    kl_teacher: float | None = field(default=None, compare=False)
    """k1 estimate of KL(policy || teacher) at the tokens that are taught, first mini-batch; None without a teacher."""
    empty_updates: int = field(default=0, compare=False)
    """Mini-batches of which corrections left nothing: they changed no weight."""
    objective: dict[str, float] = field(default_factory=dict, compare=False)
    """Means over response tokens of what the objective tells."""
    whole_minibatch_seconds: float = field(default=0.0, compare=False)
    """Time of the log-prob passes that an objective needs before its updates."""
    companions: dict[str, float] = field(default_factory=dict, compare=False)
    """Metrics of models beside the policy that learned in this step, by their names."""
    server_mismatch: tuple[ServerMismatch, ...] = ()
    """By the server's number, over the first mini-batch. Where one of them is above weights.mismatch_limit nothing was updated."""
    mtp_loss: float | None = None
    """Mean cross-entropy of multi-token prediction over depths and response tokens, in nats; None if it is not trained."""
    routing: RoutingStats | None = None
    """None for a dense model, and where there is no model."""
    memory: MemoryStats | None = field(default=None, compare=False)
    """None where there is no model."""
    skipped_updates: tuple[str, ...] = ()
    """Where loss or gradient was not finite, for each mini-batch in which one was: it changed no weight and is in no statistic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint that became visible."""

    version: int
    num_bytes: int
    """Tensors of all ranks."""
    seconds: float
    """From the request to the rename."""
    blocked_seconds: float
    """During which training stood still."""
