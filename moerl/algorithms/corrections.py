"""Weights of tokens for samples that a server drew with other probabilities than the trainer's, by `algorithm.corrections`.

rho = exp(log-prob by the old policy in the trainer - that by the server). A weight has no gradient. The driver has these objects too, and
no torch: formulas are in correction_weights.py.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from moerl.config.schema.correction_config import TIS, Correction, IcePop, OffPolicySequenceMask, Rejection, SequenceMaskTIS
from moerl.config.schema.custom_part import CustomPart

if TYPE_CHECKING:
    from moerl.algorithms.columns import TokenColumns, Weights


class Correcting(Protocol):
    """Correction. Implementations: Shipped, and classes of kind=custom. One whose `needs` have old_logprobs is asked once for a mini-batch,
    with whole sequences and before its update; others with every micro-batch."""

    def weights(self, columns: "TokenColumns") -> "Weights": ...


def correction_of(config: Correction) -> Correcting:
    if isinstance(config, CustomPart):
        own: Correcting = config.build()
        return own
    return Shipped(config)


@dataclass(frozen=True)
class Shipped:
    config: TIS | IcePop | Rejection | OffPolicySequenceMask | SequenceMaskTIS

    @property
    def needs(self) -> frozenset[Any]:
        return self.config.needs

    @property
    def is_normalized(self) -> bool:
        return isinstance(self.config, TIS) and self.config.normalized

    def weights(self, columns: "TokenColumns") -> "Weights":
        from moerl.algorithms.correction_weights import correction_weights

        return correction_weights(self.config, columns)
