"""Every algorithm and correction, one after the other on the ranks of a test."""

from dataclasses import replace

import numpy as np
from engine_jobs import new_engine

from moerl.algorithms.mini_batch_loss import loss_of
from moerl.algorithms.outcome_loss import outcome_loss
from moerl.config.algorithm_settings import of_plain
from moerl.train.engine_settings import EngineSettings
from moerl.types.batch import TrainBatch
from moerl.types.kept_vocabulary import KeptVocabulary

LR = 0.001
"""Of an optimizer with eps=1, whose step follows every element of the gradient; Adam's with 1e-8 would follow little but signs."""

OBJECTIVES = (
    {"kind": "ppo_clip", "dual_clip": 1.5}, {"kind": "gspo", "clip_low": 0.01, "clip_high": 0.01},
    {"kind": "gspo_token", "clip_low": 0.01, "clip_high": 0.01}, {"kind": "cispo", "clip_low": 0.1, "clip_high": 0.1}, {"kind": "sapo"},
    {"kind": "gmpo", "clip_low": 0.05, "clip_high": 0.05}, {"kind": "clip_cov", "share": 0.1}, {"kind": "kl_cov", "share": 0.1},
    {"kind": "m2po", "tau": 0.01}, {"kind": "dppo_tv", "low": 0.002, "high": 0.002}, {"kind": "dppo_kl", "low": 1e-4, "high": 1e-4},
    {"kind": "dppo_tv_prime", "low": 0.002, "high": 0.002}, {"kind": "ipo", "divergence": 0.002}, {"kind": "reinforce"},
)  # fmt: skip
CORRECTIONS = (
    [{"kind": "tis", "cap": 1.1}], [{"kind": "tis", "level": "sequence", "cap": 1.3}], [{"kind": "tis", "cap": 1.1, "normalized": True}],
    [{"kind": "tis", "level": "sequence", "cap": 1.3, "normalized": True}],
    [{"kind": "icepop", "low": 0.9, "high": 1.1}], [{"kind": "opsm", "delta": 0.01}],
    [{"kind": "sequence_mask_tis", "low": 0.95, "high": 1.05}],
    *([{"kind": "rejection", "statistic": "k1", "level": level, "low": 0.9, "high": 1.15}] for level in ("token", "sum", "mean")),
    [{"kind": "rejection", "statistic": "k3", "level": "max", "high": 0.02}, {"kind": "tis", "cap": 1.1, "normalized": True}],
    [{"kind": "rejection", "statistic": "k1", "level": "max", "low": 0.85, "high": 1.2}],
    *([{"kind": "rejection", "statistic": "k2", "level": level, "high": high}]
      for level, high in (("token", 0.01), ("sum", 0.1), ("mean", 0.01), ("max", 0.04))),
    *([{"kind": "rejection", "statistic": "k3", "level": level, "high": high}]
      for level, high in (("token", 0.01), ("sum", 0.1), ("mean", 0.01))),
)  # fmt: skip
KL_ESTIMATORS = ("k1", "k1+", "abs", "abs+", "k2", "k3", "k3+", "unbiased")
OLD_POLICIES = ("log_linear", "bypass", "not moved")
"""Where the old log-probs are from beside a pass for them: between server and policy by age, the server, the policy itself."""
SETS = "sampling sets"
"""Servers that drew from a part of the vocabulary, by top-k or top-p."""


def losses():
    """Losses by name: every objective and correction, every aggregation and terms beside the objective."""
    plain = {objective["kind"]: {"objective": objective, "normalize_by": "sequence"} for objective in OBJECTIVES}
    for corrections in CORRECTIONS:
        name = " ".join(".".join(map(str, part.values())) for part in corrections)
        plain[name] = {"objective": {"kind": "ppo_clip"}, "corrections": corrections, "normalize_by": "token"}
    clip_cov = {"kind": "clip_cov", "share": 0.1}
    mean = {"kind": "rejection", "statistic": "k1", "level": "mean", "low": 0.9, "high": 1.15}
    plain["rejected, then selected"] = {"objective": clip_cov, "corrections": [mean], "normalize_by": "sequence_sum"}
    for kind in KL_ESTIMATORS:
        plain[f"KL {kind}"] = {"objective": {"kind": "ppo_clip"}, "normalize_by": "token", "kl_coefficient": 0.1, "kl_estimator": kind}
    plain |= {policy: {"objective": {"kind": "ppo_clip"}, "normalize_by": "token"} for policy in OLD_POLICIES}
    plain[SETS] = {"objective": {"kind": "ppo_clip"}, "normalize_by": "token", "kl_coefficient": 0.1, "entropy_bonus": 0.05}
    terms = {"kl_coefficient": 0.1, "kl_estimator": "unbiased", "entropy_bonus": 0.05, "drift_penalty": 0.1}
    plain["terms"] = {"objective": {"kind": "gspo"}, "normalize_by": "fixed_length", "fixed_length": 9, **terms}
    found = {name: loss_of(of_plain({"advantage": {"kind": "grpo"}, **settings})) for name, settings in plain.items()}
    return found | {"outcomes": outcome_loss(0.5)}


def ragged_batch(*, num_sequences: int = 13, outside: float = 0.0) -> TrainBatch:
    """Sequences of 4 to 19 tokens with holes in the mask, and one without a response; credit and weights of tokens. Log-probs but the
    teacher's are differences from the policy's. `outside`: values that must not matter."""
    rng = np.random.default_rng(3)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(4, 20, size=num_sequences))])
    total = int(offsets[-1])
    mask_T = rng.random(total) < 0.7
    mask_T[offsets[:-1]] = mask_T[offsets[:-1] + 1] = False
    mask_T[offsets[4] : offsets[5]] = False
    is_tool_T = ~mask_T & (rng.random(total) < 0.5)
    is_tool_T[offsets[:-1]] = False

    def column(values_T: np.ndarray) -> np.ndarray:
        return np.where(mask_T, values_T, outside).astype(np.float32)

    return TrainBatch(
        token_ids_T=rng.integers(5, 90, size=total),
        response_mask_T=mask_T,
        rollout_logprobs_T=column(rng.normal(size=total) * 0.1),
        old_logprobs_T=column(rng.normal(size=total) * 0.1),
        reference_logprobs_T=column(rng.normal(size=total) * 0.1),
        advantages_T=column(rng.normal(size=total)),
        rl_weight_T=column(rng.random(total)),
        ce_weight_T=np.where(is_tool_T, 0.1, 0).astype(np.float32),
        kl_weight_T=np.where(mask_T & (rng.random(total) < 0.3), 0.2, 0).astype(np.float32),
        teacher_logprobs_T=column(rng.normal(size=total) * 0.1 - 4.5),
        offsets=offsets,
    )


def train_by_each(settings: EngineSettings, batch: TrainBatch, order: list[int]):
    """Statistics of an update by each loss in turn, and the log-probs afterwards, in the batch's own order. `order`: of the sequences as
    the engine gets them."""
    engine = new_engine(settings)
    batch = batch.select(order)
    names = ("old_logprobs_T", "rollout_logprobs_T", "reference_logprobs_T")

    def near(sets: KeptVocabulary | None) -> TrainBatch:
        given = replace(batch, sets=sets)
        drawn_T, whole_T = engine.logprobs(given), engine.logprobs(batch)
        firsts = {name: whole_T if name == "reference_logprobs_T" else drawn_T for name in names}
        return replace(given, **{name: (first_T + getattr(batch, name)).astype(np.float32) for name, first_T in firsts.items()})

    batches = {None: near(None), SETS: near(_sets_of(batch))}
    found = {}
    for name, loss in losses().items():
        stats = engine.update(_with_old(name, batches.get(name, batches[None])), loss, lr=LR, num_updates=1)
        found[name] = (stats, replace(batch, rollout_logprobs_T=engine.logprobs(batch)).select(np.argsort(order)).rollout_logprobs_T)
    return found


def _sets_of(batch: TrainBatch) -> KeptVocabulary:
    """Of two tokens in three a set of one to four, which follows from the token, whatever the order."""
    others = [[(token * factor + 1) % 90 for factor in range(token % 4)] for token in batch.token_ids_T]
    rows = [sorted({token, *more}) if token % 3 else [] for token, more in zip(batch.token_ids_T, others, strict=True)]
    return KeptVocabulary.of_counts(np.concatenate([np.array(row, dtype=np.int32) for row in rows]), np.array([len(row) for row in rows]))


def _with_old(name: str, batch: TrainBatch) -> TrainBatch:
    match name:
        case "log_linear":
            shares_T = np.random.default_rng(4).random(40)[batch.token_ids_T % 40]  # follows its token, whatever the order
            return replace(batch, old_logprobs_T=None, proximal_T=shares_T.astype(np.float32))
        case "bypass":
            return replace(batch, old_logprobs_T=batch.rollout_logprobs_T)
        case "not moved":
            return replace(batch, old_logprobs_T=None)
    return batch
