"""Algorithm: which groups to keep, what credit each sample gets, what one token costs.

Masking, packing, normalization and parallelism are the trainer's job. Axis suffixes: `_G` samples of a group, `_T` tokens.
"""

from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from moerl.types.groups import Group

if TYPE_CHECKING:
    from torch import Tensor

NormalizeBy = Literal["token", "sequence"]


class Objective(Protocol):
    """The part of an algorithm that the train ranks run; it travels to them pickled."""

    @property
    def normalize_by(self) -> NormalizeBy:
        """token: sum over the mini-batch / its response tokens. sequence: mean over sequences of their token means."""

    @property
    def uses_reference(self) -> bool:
        """Whether `token_loss` needs log-probs of the frozen initial model."""

    def token_loss(
        self, logp_T: "Tensor", old_logp_T: "Tensor", advantage_T: "Tensor", reference_logp_T: "Tensor | None"
    ) -> "tuple[Tensor, Tensor]":
        """The loss of every token [T] with its gradient, and whether clipping removed that token's policy gradient [T] bool."""


class Algorithm(Objective, Protocol):
    """An objective and the decisions about groups that the driver takes. All methods are pure."""

    @property
    def max_attempts(self) -> int:
        """A step may draw this many times its groups; 1 where `keep` never says no."""

    def keep(self, group: Group) -> bool:
        """Whether the group is worth training on; one that is not is replaced by the next prompt (dynamic sampling)."""

    def sample_mask(self, group: Group) -> np.ndarray:
        """bool [G]. A sample outside the mask carries no loss, and its reward enters nothing."""

    def rewards(self, group: Group) -> np.ndarray:
        """float64 [G], after shaping: what the advantages are computed from."""

    def advantages(self, group: Group) -> np.ndarray:
        """float64 [G], one credit for all tokens of a sample; 0 outside the mask."""
