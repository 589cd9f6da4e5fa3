"""The loss by which a model of outcomes tells right answers from wrong ones (arXiv:2502.01456, equation 5).

Log-probs of an answer relative to the model's initial weights are its score: beta * their sum. The advantage column holds 1 for the tokens
of a right answer and 0 for those of a wrong one.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from moerl.algorithms.mini_batch_loss import Loss

if TYPE_CHECKING:
    from moerl.algorithms.columns import TokenColumns, TokenLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeObjective:
    """Cross-entropy of sigmoid(score) of a sequence, in equal parts at its response tokens."""

    beta: float
    metric_names: ClassVar[tuple[str, ...]] = ("told_rightly", "right", "sequences")
    """Numbers of sequences, likewise in parts."""

    def token_loss(self, columns: "TokenColumns") -> "TokenLoss":
        import torch  # by the ranks: the driver, which has this object too, has none
        from torch.nn.functional import binary_cross_entropy_with_logits

        from moerl.algorithms.columns import TokenLoss

        assert columns.reference_logp_T is not None, "log-probs are relative to those of the initial weights"
        score_T = self.beta * columns.sums_T(columns.logp_T - columns.reference_logp_T)
        right_T = columns.advantage_T
        loss_T = binary_cross_entropy_with_logits(score_T, right_T, reduction="none") / columns.tokens_T
        told_T = ((score_T.detach() > 0) == (right_T > 0)).to(right_T.dtype)
        told = {"told_rightly": told_T, "right": right_T, "sequences": torch.ones_like(right_T)}
        metrics = {name: count_T / columns.tokens_T for name, count_T in told.items()}
        return TokenLoss(loss_T=loss_T, clipped_T=torch.zeros_like(columns.mask_T), metrics=metrics)


def outcome_loss(beta: float) -> Loss:
    """The mean over the sequences of a mini-batch."""
    return Loss(objective=OutcomeObjective(beta=beta), normalize_by="sequence_sum", needs=frozenset({"reference"}))
