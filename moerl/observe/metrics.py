"""The numbers of one step under flat names, and what each name means.

METRICS is the vocabulary: the terminal, TensorBoard, wandb, metrics.jsonl and the report all use exactly these names. A name
that ends in `*` stands for a family. Metrics are for looking at; nothing in a run is decided by one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Literal, get_args

import numpy as np

from moerl.algorithms.advantages import is_rounding
from moerl.types.completion import DraftCounts
from moerl.types.groups import Group, Sample
from moerl.types.push import PushStats
from moerl.types.stats import MemoryStats, Move, RoutingStats, SavedCheckpoint, StepStats

Reduction = Literal["mean", "max", "min", "sum", "last"]
"""How the values of several steps become one number."""
Goal = Literal["up", "down", "zero", "steady", "none"]
"""Where a healthy run takes the value. zero: a difference that should not exist. steady: a sudden change is a warning."""


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    unit: str
    goal: Goal
    over_steps: Reduction
    meaning: str


MEAN, MAX, MIN, SUM, LAST = get_args(Reduction)

# "samples" are the scored samples of the groups trained in this step.
METRICS = (
    Metric("reward/mean", "reward", "up", MEAN, "mean over samples"),
    Metric("reward/std", "reward", "steady", MEAN, "standard deviation over samples; 0 leaves nothing to learn from"),
    Metric("reward/min", "reward", "up", MIN, "lowest of the step"),
    Metric("reward/max", "reward", "up", MAX, "highest of the step"),
    Metric("reward/part/*", "unweighted", "up", MEAN, "mean of one reward term, by its name, over the samples that have it"),
    Metric("reward/errors", "completions", "zero", SUM, "completions that could not be scored; those at temperature 0 (remax) too"),
    Metric("length/mean", "tokens", "steady", MEAN, "mean response length"),
    Metric("length/max", "tokens", "none", MAX, "longest response"),
    Metric("length/truncated", "share", "down", MEAN, "samples cut at the response limit (finish reason length)"),
    Metric("staleness/mean", "versions", "down", MEAN, "version trained from minus the oldest version that sampled the response, mean"),
    Metric("staleness/max", "versions", "down", MAX, "the same, largest; at most max_staleness"),
    Metric("groups/solved", "share", "up", MEAN, "trained groups whose samples all have the full reward: too easy to learn from"),
    Metric("groups/uniform", "share", "down", MEAN, "trained groups whose rewards, before shaping, are all equal"),
    Metric("groups/dropped", "groups", "down", SUM, "groups drawn for this step and discarded by dynamic sampling"),
    Metric("groups/parked", "groups", "none", SUM, "begun for this step and put off, to begin anew; absent unless spare_groups > 0"),
    Metric("eval/*", "", "up", LAST, "eval/DATASET/NAME: reward, pass@k and its standard error, length, truncated and unscorable samples"),
    Metric("fleet/restarts", "restarts", "zero", LAST, "of rollout servers that ended or hung, since this process of the run began"),
    Metric("fleet/retired", "servers", "zero", LAST, "ended for good: what they answered cannot be true, or is of other weights"),
    Metric("fleet/resumed", "completions", "none", LAST, "that went on from their tokens after a push (rollout.partial), since then"),
    Metric("fleet/preempted", "preemptions", "zero", LAST, "of requests for whose next token a server's cache had no room, since then"),
    Metric("fleet/bound", "requests", "steady", MIN, "that the server with least room may have; at most max_running + max_queued"),
    Metric("fleet/acceptance_length", "tokens", "up", MEAN, "of a pass that checks drafts: one, and those it accepts"),
    Metric("train/loss", "loss", "none", MEAN, "policy loss, KL term included; its sign and size say little"),
    Metric("train/grad_norm", "norm", "steady", MEAN, "global gradient norm before clipping; with several updates the largest of theirs"),
    Metric("train/lr", "rate", "none", LAST, "learning rate of the step"),
    Metric("train/entropy", "nats/token", "steady", MEAN, "mean over response tokens; a fall to 0 is a collapse, a rise is noise"),
    Metric("train/kl_old", "nats/token", "zero", MEAN, "KL(old policy || policy); exactly 0 with one update and the trainer's own"),
    Metric("train/kl_reference", "nats/token", "steady", MEAN, "KL(policy || initial model); absent without a reference"),
    Metric("train/clip_fraction", "share", "steady", MEAN, "response tokens whose ratio was clipped"),
    Metric("train/kl_old_k1", "nats/token", "zero", MEAN, "KL(old policy || policy), k1 estimate"),
    Metric("train/kl_coefficient", "weight", "none", LAST, "of an adaptive KL, in the update"),
    Metric("train/kl_teacher", "nats/token", "down", MEAN, "KL(policy || teacher), k1 estimate, taught tokens; absent without a teacher"),
    Metric("objective/*", "", "none", MEAN, "what the objective tells, mean over response tokens: dual_clipped, selected"),
    Metric("critic/loss", "reward^2", "down", MEAN, "half the squared distance of its values from the returns, with the clip"),
    Metric("critic/explained_variance", "share", "up", MEAN, "1 - mean((return - value)^2) / variance of returns, in its update"),
    Metric("critic/value", "reward", "none", MEAN, "mean over response tokens, in its update"),
    Metric("critic/return", "reward", "none", MEAN, "mean of what it is to estimate"),
    Metric("critic/clipped", "share", "down", MEAN, "tokens whose value the clip holds"),
    Metric("outcome_model/loss", "nats/answer", "down", MEAN, "cross-entropy of right and wrong answers; log 2 is a coin's"),
    Metric("outcome_model/accuracy", "share", "up", MEAN, "answers that it tells rightly, in its updates"),
    Metric("outcome_model/right", "share", "up", MEAN, "answers that were right"),
    Metric("companion/*", "", "none", MEAN, "NAME/grad_norm, lr, skipped_updates: of that model's update, as train/* of the policy's"),
    Metric("correction/weight", "factor", "steady", MEAN, "mean factor of corrections on the policy loss of a token; 1 without any"),
    Metric("correction/bounded", "share", "down", MEAN, "tokens at a bound of a correction, dropped ones included"),
    Metric("correction/dropped", "share", "down", MEAN, "tokens that a correction took out of the mini-batch"),
    Metric("train/mtp_loss", "nats/token", "down", MEAN, "cross-entropy of multi-token prediction; absent unless train.mtp_loss > 0"),
    Metric("train/skipped_updates", "updates", "zero", SUM, "mini-batches that changed no weight: loss or gradient was not finite"),
    Metric("mismatch/mean", "nats/token", "zero", MEAN, "mean |log-prob(trainer) - log-prob(rollout)|, first mini-batch"),
    Metric("mismatch/max", "nats/token", "zero", MAX, "the same, largest"),
    Metric("mismatch/kl", "nats/token", "zero", MEAN, "KL(rollout || trainer), k3 estimate"),
    Metric("mismatch/k1", "nats/token", "zero", MEAN, "KL(rollout || trainer), k1 estimate"),
    Metric("mismatch/chi2", "", "zero", MEAN, "mean of (trainer / rollout probability)^2 - 1"),
    Metric("mismatch/effective", "share", "up", MEAN, "samples that count in effect: 1 / mean((rho / mean rho)^2), rho that ratio"),
    Metric("mismatch/correlation", "", "up", MEAN, "Pearson's, of the log-probs of trainer and rollout"),
    Metric("mismatch/trainer_perplexity", "", "steady", MEAN, "exp(-mean log-prob) of the sampled tokens under the trainer"),
    Metric("mismatch/server_perplexity", "", "steady", MEAN, "the same under the servers"),
    Metric("tokens/response", "tokens", "none", SUM, "response tokens of samples; not of those that could not be scored"),
    Metric("tokens/trained", "tokens", "none", SUM, "response tokens that carried loss"),
    Metric("tokens/per_second", "tokens/s", "up", MEAN, "tokens/response divided by time/step"),
    Metric("data/payload_bytes", "bytes", "none", SUM, "tokens, log-probs, routes and text of the samples: what went by reference"),
    Metric("tokens/padding_fraction", "share", "down", MEAN, "micro-batch tokens that are padding"),
    Metric("balance/ranks", "ratio", "down", MEAN, "work of the busiest data-parallel rank / mean; at least 1"),
    Metric("balance/rounds", "ratio", "down", MEAN, "the same if ranks wait for each other after every micro-batch, as with ep"),
    Metric("routing/load_max", "ratio - 1", "steady", MAX, "busiest expert's share of a layer's routes * experts - 1; largest of all"),
    Metric("routing/load_min", "ratio - 1", "steady", MIN, "the same of the idlest expert, smallest of all layers; -1: it got no token"),
    Metric("routing/load_mean", "ratio - 1", "steady", MEAN, "mean over experts and layers of the absolute value; 0 is an even load"),
    Metric("routing/dead_experts", "experts", "zero", MEAN, "experts of all layers that got no token of the step"),
    Metric("routing/replayed", "share", "steady", MEAN, "routes of the update that were replayed; absent without train.router_replay"),
    Metric("routing/overlap", "share", "up", MEAN, "replayed sets of experts that the trainer would have chosen too, mean over layers"),
    Metric("routing/payload_bytes", "bytes", "none", SUM, "routes engines returned: tokens * layers * top_k, * 2 over 256 experts"),
    Metric("routing/layer/*", "", "none", MEAN, "layer/NUMBER/NAME: load_max, load_min, load_mean, dead_experts, overlap of that layer"),
    Metric("checkpoint/bytes", "bytes", "none", LAST, "tensors of a checkpoint, all ranks; in the step reported after it was complete"),
    Metric("checkpoint/seconds", "s", "down", MEAN, "from the request of that checkpoint until it was complete"),
    Metric("checkpoint/blocked_seconds", "s", "down", SUM, "part of it during which training stood still"),
    Metric("memory/device/*", "bytes", "none", MAX, "device/STATE/KIND: on the device in that state, of the train rank that holds most"),
    Metric("memory/host/*", "bytes", "none", MAX, "host/KIND: copies in host memory, of the same rank"),
    Metric("memory/peak/*", "bytes", "none", MAX, "allocated, reserved, used on that rank's GPU in an update; process: its host memory"),
    Metric("memory/seconds/*", "s", "down", SUM, "moves from one state to another since the update before (train.offload)"),
    Metric("residency/seconds/*", "s", "down", SUM, "moves between trainer and servers on shared GPUs, since the step before"),
    Metric("residency/bytes/*", "bytes", "none", MEAN, "what these moved, over ranks or servers; 0 where a platform has nothing to move"),
    Metric("push/seconds", "s", "down", MEAN, "newest push before this step, with its plan if servers changed, without pause and canary"),
    Metric("push/bytes", "bytes", "none", MEAN, "what the ranks packed for it, with padding"),
    Metric("push/network_bytes", "bytes", "none", MEAN, "of it over the network, once to a node that reads and lacks it (nccl)"),
    Metric("push/written_bytes", "bytes", "none", MEAN, "of its files (weights.transport=disk)"),
    Metric("time/step", "s", "down", SUM, "wall time from the end of the previous step to the end of this one"),
    Metric("time/other", "s", "down", SUM, "part of time/step outside every phase"),
    Metric("time/whole_minibatch", "s", "down", SUM, "part of time/update: log-prob passes that the objective needs before its updates"),
    Metric("time/*", "s", "down", SUM, "wall time of one phase of the loop, by its name; push, save, eval: those after the step before"),
)  # fmt: skip

NOT_PHASES = ("time/step", "time/other", "time/whole_minibatch")
"""Names of time/* beside those of phases: the whole, what is outside of every phase, and a part of one."""

_BY_NAME = {entry.name: entry for entry in METRICS}
_FAMILIES = tuple(name.removesuffix("*") for name in _BY_NAME if name.endswith("*"))


def metric(name: str) -> Metric:
    """The vocabulary's entry for `name`, or for its family. KeyError for a name nobody documented."""
    families = (f"{family}*" for family in _FAMILIES if name.startswith(family))
    return _BY_NAME[name if name in _BY_NAME else next(families, name)]


def is_known(name: str) -> bool:
    return name in _BY_NAME or name.startswith(_FAMILIES)


def step_metrics(
    version: int,
    groups: Sequence[Group],
    stats: StepStats,
    *,
    phase_seconds: Mapping[str, float],
    step_seconds: float,
    full_reward: float,
) -> dict[str, float]:
    """Metrics of the step that produced `version`, by its samples, its update and its clock; others come from their owners.

    `full_reward` is the most a sample can get. What the step has no sample for, or no reference for, is absent, not 0.
    """
    samples = [sample for group in groups for sample in group.samples]
    num_tokens = sum(sample.num_tokens for sample in samples)
    return {
        **_sample_metrics(samples),
        "reward/errors": float(sum(len(group.errors) for group in groups)),
        **_staleness_metrics(version - 1, samples),
        **_draft_metrics(samples),
        **_group_metrics(groups, full_reward),
        **_train_metrics(stats),
        **({} if stats.memory is None else _memory_metrics(stats.memory)),
        **({} if stats.routing is None else _routing_metrics(stats.routing)),
        **_payload_metrics(samples),
        "tokens/response": float(num_tokens),
        "tokens/trained": float(stats.num_tokens),
        "tokens/per_second": num_tokens / step_seconds,
        "tokens/padding_fraction": stats.padding_fraction,
        "balance/ranks": stats.rank_imbalance,
        "balance/rounds": stats.round_imbalance,
        "time/step": step_seconds,
        **{f"time/{name}": seconds for name, seconds in phase_seconds.items()},
        "time/other": max(0.0, step_seconds - sum(phase_seconds.values())),
    }


def checkpoint_metrics(saved: SavedCheckpoint) -> dict[str, float]:
    return {
        "checkpoint/bytes": float(saved.num_bytes),
        "checkpoint/seconds": saved.seconds,
        "checkpoint/blocked_seconds": saved.blocked_seconds,
    }


def summarize(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One number per metric over `rows`, each by its own reduction; steps that lack a metric are passed over.

    So are names outside the vocabulary: `rows` may come from a file of another version.
    """
    names = dict.fromkeys(name for row in rows for name in row if is_known(name))
    return {name: _reduced(metric(name).over_steps, [row[name] for row in rows if name in row]) for name in names}


def _reduced(how: Reduction, values: Sequence[float]) -> float:
    return float(values[-1] if how == "last" else getattr(np, how)(values))


def _sample_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    if not samples:
        return {}
    rewards, lengths = np.array([sample.score.reward for sample in samples]), np.array([sample.num_tokens for sample in samples])
    parts = dict.fromkeys(chain.from_iterable(sample.score.parts for sample in samples))
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        **{
            f"reward/part/{part}": float(np.mean([sample.score.parts[part] for sample in samples if part in sample.score.parts]))
            for part in parts
        },
        "length/mean": float(lengths.mean()),
        "length/max": float(lengths.max()),
        "length/truncated": float(np.mean([sample.completion.finish_reason == "length" for sample in samples])),
    }


def _staleness_metrics(trained_version: int, samples: Sequence[Sample]) -> dict[str, float]:
    # A completion aborted before its first token has no span, hence no version.
    spans = [[span for segment in sample.segments for span in segment.spans] for sample in samples]
    oldest = [min(span.version for span in of_sample) for of_sample in spans if of_sample]
    if not oldest:
        return {}
    staleness = trained_version - np.array(oldest)
    return {"staleness/mean": float(staleness.mean()), "staleness/max": float(staleness.max())}


def _draft_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    drafts = sum((segment.drafts for sample in samples for segment in sample.segments), DraftCounts())
    return {"fleet/acceptance_length": 1 + drafts.accepted / drafts.checks} if drafts.checks else {}


def _group_metrics(groups: Sequence[Group], full_reward: float) -> dict[str, float]:
    rewards = [group.rewards_G for group in groups if group.samples]
    if not rewards:
        return {}
    # Weighted sums of parts carry rounding, so a full reward is one within 1e-6 of the sum of the weights.
    return {
        "groups/solved": float(np.mean([rewards_G.min() >= full_reward - 1e-6 for rewards_G in rewards])),
        "groups/uniform": float(np.mean([is_rounding(np.ptp(rewards_G), rewards_G) for rewards_G in rewards])),
    }


def _train_metrics(stats: StepStats) -> dict[str, float]:
    return {
        "train/loss": stats.loss,
        "train/grad_norm": stats.grad_norm,
        "train/lr": stats.learning_rate,
        "train/entropy": stats.entropy,
        "train/kl_old": stats.kl_old,
        **({} if stats.kl_reference is None else {"train/kl_reference": stats.kl_reference}),
        "train/clip_fraction": stats.clip_fraction,
        **({} if stats.mtp_loss is None else {"train/mtp_loss": stats.mtp_loss}),
        "train/kl_old_k1": stats.kl_old_k1,
        **({} if stats.kl_coefficient is None else {"train/kl_coefficient": stats.kl_coefficient}),
        **({} if stats.kl_teacher is None else {"train/kl_teacher": stats.kl_teacher}),
        **{f"objective/{name}": value for name, value in stats.objective.items()},
        **stats.companions,
        "correction/weight": stats.correction_weight,
        "correction/bounded": stats.correction_bounded,
        "correction/dropped": stats.correction_dropped,
        "train/skipped_updates": float(len(stats.skipped_updates)),
        "mismatch/mean": stats.mismatch_mean,
        "mismatch/max": stats.mismatch_max,
        "mismatch/kl": stats.mismatch_kl,
        **({} if stats.mismatch is None else {f"mismatch/{name}": value for name, value in asdict(stats.mismatch).items()}),
        **({} if stats.whole_minibatch_seconds == 0 else {"time/whole_minibatch": stats.whole_minibatch_seconds}),
    }


def move_metrics(moves: Mapping[str, Move]) -> dict[str, float]:
    """Metrics of the moves of GPU memory between trainer and servers, by name."""
    seconds = {f"residency/seconds/{name}": move.seconds for name, move in moves.items()}
    return seconds | {f"residency/bytes/{name}": float(move.num_bytes) for name, move in moves.items()}


def push_metrics(pushed: PushStats) -> dict[str, float]:
    return {
        "push/seconds": pushed.seconds,
        "push/bytes": float(pushed.num_bytes),
        "push/network_bytes": float(pushed.num_network),
        "push/written_bytes": float(pushed.num_written),
    }


def _routing_metrics(routing: RoutingStats) -> dict[str, float]:
    by_layer: dict[str, Sequence[float]] = {
        "load_max": routing.load_max,
        "load_min": routing.load_min,
        "load_mean": routing.load_mean,
        "dead_experts": routing.dead_experts,
        **({} if routing.overlap is None else {"overlap": routing.overlap}),
    }
    over_layers: dict[str, Callable[[np.ndarray], float]] = {"load_max": np.max, "load_min": np.min, "dead_experts": np.sum}
    return {
        **{f"routing/{name}": float(over_layers.get(name, np.mean)(np.array(values))) for name, values in by_layer.items()},
        **({} if routing.replayed is None else {"routing/replayed": routing.replayed}),
        **{
            f"routing/layer/{layer}/{name}": float(value)
            for name, values in by_layer.items()
            for layer, value in zip(routing.layers, values, strict=True)
        },
    }


def _payload_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    routes = sum(segment.routes_bytes for sample in samples for segment in sample.segments)
    return {
        "data/payload_bytes": float(sum(segment.num_bytes for sample in samples for segment in sample.segments)),
        **({"routing/payload_bytes": float(routes)} if routes else {}),
    }


def _memory_metrics(memory: MemoryStats) -> dict[str, float]:
    """Kinds that hold nothing are left out."""
    device = {f"memory/device/{state}/{kind}": held for state, kinds in memory.device_bytes.items() for kind, held in kinds.items()}
    host = {f"memory/host/{kind}": held for kind, held in memory.host_bytes.items()}
    peaks = {f"memory/peak/{name}": size for name, size in memory.peaks.items()}
    return {
        **{name: float(held) for name, held in {**device, **host, **peaks}.items() if held},
        **{f"memory/seconds/{name}": seconds for name, seconds in memory.transition_seconds.items()},
    }
