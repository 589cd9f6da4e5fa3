"""Loss of a mini-batch, as the driver, without torch, puts it together and the ranks compute it (moerl/train/loss/batch_loss.py)."""

from dataclasses import dataclass
from typing import ClassVar

from moerl.algorithms.corrections import Correcting, correction_of
from moerl.algorithms.objectives import Objective, objective_of
from moerl.config.schema.algorithm_config import AlgorithmConfig, KLEstimator
from moerl.config.schema.custom_part import Need


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Parts of the loss; it travels to the ranks pickled."""

    objective: Objective | None = None
    """None: nothing of the policy is trained by reward; the batch has tokens with other weights."""
    corrections: tuple[Correcting, ...] = ()
    normalize_by: str = "token"
    """As AlgorithmConfig has it."""
    fixed_length: int | None = None
    kl_coefficient: float = 0.0
    """Weight in the loss."""
    kl_estimator: KLEstimator = "k3"
    entropy_bonus: float = 0.0
    drift_penalty: float = 0.0
    needs: frozenset[Need] = frozenset()

    @property
    def uses_reference(self) -> bool:
        return "reference" in self.needs

    @property
    def metric_names(self) -> tuple[str, ...]:
        return () if self.objective is None else tuple(self.objective.metric_names)

    @property
    def live_corrections(self) -> tuple[Correcting, ...]:
        """Those that are asked with every micro-batch."""
        return tuple(each for each in self.corrections if "old_logprobs" not in getattr(each, "needs", ()))

    @property
    def corrections_before(self) -> tuple[Correcting, ...]:
        """Those that are asked before an update."""
        return tuple(each for each in self.corrections if "old_logprobs" in getattr(each, "needs", ()))


SUPERVISED = Loss()
"""Only what a batch weighs: the negative log-likelihood of tokens (`ce_weight_T`), as in supervised fine-tuning, and the distance from a
teacher (`kl_weight_T`)."""


def loss_of(config: AlgorithmConfig) -> Loss:
    return Loss(
        objective=objective_of(config.objective),
        corrections=tuple(map(correction_of, config.corrections)),
        normalize_by=config.normalize_by,
        fixed_length=config.fixed_length,
        kl_coefficient=config.kl_coefficient if config.kl_in == "loss" else 0.0,
        kl_estimator=config.kl_estimator,
        entropy_bonus=config.entropy_bonus,
        drift_penalty=config.drift_penalty,
        needs=config.needs,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLossSettings:
    """A critic's: max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2 of a token, arXiv:1707.06347's implementation."""

    clip: float | None = None
    """None: (V - R)^2 / 2."""
    metric_names: ClassVar[tuple[str, ...]] = ("value", "return", "return_squared", "error_squared", "clipped_values")
    needs: ClassVar[frozenset[Need]] = frozenset()
    uses_reference: ClassVar[bool] = False
