"""Losses of a token by `algorithm.objective.kind`. The driver has these objects too, and no torch: formulas are in token_losses.py
and token_selection.py.

Forms and conventions: docs/algorithms.md.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from moerl.config.schema.custom_part import CustomPart
from moerl.config.schema.loss_config import M2PO, ClipCov, KLCov, ObjectiveConfig

if TYPE_CHECKING:
    from torch import Tensor

    from moerl.algorithms.columns import TokenColumns, TokenLoss


class Objective(Protocol):
    """Loss of a token; it travels to the ranks pickled. Implementations: below, and classes of `algorithm.objective.kind=custom`."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of what `token_loss` returns as metrics."""

    def token_loss(self, columns: "TokenColumns") -> "TokenLoss": ...


class Selecting(Objective, Protocol):
    """One that needs the whole mini-batch: every update is preceded by a pass for the policy's log-probs, and by these two."""

    def statistics(self, columns: "TokenColumns") -> "Tensor":
        """[k, T], of a rank's sequences; outside the mask anything."""

    def select(self, statistics_kN: "Tensor") -> "Tensor":
        """bool [N], of the response tokens of the mini-batch in its order; every rank computes the same."""


def objective_of(config: ObjectiveConfig) -> Objective:
    if isinstance(config, CustomPart):
        own: Objective = config.build()
        return own
    return Selected(config) if isinstance(config, ClipCov | KLCov | M2PO) else Plain(config)


@dataclass(frozen=True)
class Plain:
    """A loss that looks at a token and its sequence alone."""

    config: Any

    @property
    def metric_names(self) -> tuple[str, ...]:
        return ("dual_clipped",) if getattr(self.config, "dual_clip", None) is not None else ()

    def token_loss(self, columns: "TokenColumns") -> "TokenLoss":
        from moerl.algorithms.token_losses import plain_loss

        return plain_loss(self.config, columns)


@dataclass(frozen=True)
class Selected:
    """A loss for which tokens of the whole mini-batch are chosen first."""

    config: ClipCov | KLCov | M2PO

    @property
    def metric_names(self) -> tuple[str, ...]:
        return ("selected", "dual_clipped") if getattr(self.config, "dual_clip", None) is not None else ("selected",)

    def statistics(self, columns: "TokenColumns") -> "Tensor":
        from moerl.algorithms.token_selection import statistics

        return statistics(self.config, columns)

    def select(self, statistics_kN: "Tensor") -> "Tensor":
        from moerl.algorithms.token_selection import select

        return select(self.config, statistics_kN)

    def token_loss(self, columns: "TokenColumns") -> "TokenLoss":
        from moerl.algorithms.token_selection import selected_loss

        return selected_loss(self.config, columns)
