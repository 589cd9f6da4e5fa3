"""Losses of a token by `algorithm.objective.kind`. The driver has these objects too, and no torch: formulas are in token_losses.py
and token_selection.py.

Forms and conventions: docs/algorithms.md.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from moerl.config.schema.custom_part import CustomPart
from moerl.config.schema.loss_config import ObjectiveConfig

if TYPE_CHECKING:
    from torch import Tensor

    from moerl.algorithms.columns import TokenColumns, TokenLoss


class Objective(Protocol):
    """Loss of a token; it travels to the ranks pickled. Implementations: ShippedObjective, and classes of
    `algorithm.objective.kind=custom`. One whose `needs` have whole_minibatch has `statistics` and `select` too: every update is preceded by
    a pass for the policy's log-probs, and by these two."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of what `token_loss` returns as metrics."""

    def token_loss(self, columns: "TokenColumns") -> "TokenLoss": ...


def objective_of(config: ObjectiveConfig) -> Objective:
    if isinstance(config, CustomPart):
        own: Objective = config.build()
        return own
    return ShippedObjective(config)


@dataclass(frozen=True)
class ShippedObjective:
    """A loss that looks at a token and its sequence, or one for which tokens of the whole mini-batch are chosen first, by its `needs`."""

    config: Any

    @property
    def metric_names(self) -> tuple[str, ...]:
        selected = ("selected",) if "whole_minibatch" in self.config.needs else ()
        return (*selected, "dual_clipped") if getattr(self.config, "dual_clip", None) is not None else selected

    def statistics(self, columns: "TokenColumns") -> "Tensor":
        """[k, T], of a rank's sequences before the update; outside the mask anything."""
        from moerl.algorithms.token_selection import statistics

        return statistics(self.config, columns)

    def select(self, statistics_kN: "Tensor") -> "Tensor":
        """bool [N], of the response tokens of the mini-batch in its order; every rank computes the same."""
        from moerl.algorithms.token_selection import select

        return select(self.config, statistics_kN)

    def token_loss(self, columns: "TokenColumns") -> "TokenLoss":
        if "whole_minibatch" in self.config.needs:
            from moerl.algorithms.token_selection import selected_loss

            return selected_loss(self.config, columns)
        from moerl.algorithms.token_losses import plain_loss

        return plain_loss(self.config, columns)
