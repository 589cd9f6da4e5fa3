"""Settings of a critic's loss, as they travel to its ranks: the driver, which sends them, has no torch."""

from dataclasses import dataclass
from typing import ClassVar

from moerl.config.schema.custom_part import Need


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLossSettings:
    """max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2 of a token, arXiv:1707.06347's implementation."""

    clip: float | None = None
    """None: (V - R)^2 / 2."""
    metric_names: ClassVar[tuple[str, ...]] = ("value", "return", "return_squared", "error_squared", "clipped_values")
    needs: ClassVar[frozenset[Need]] = frozenset()
    uses_reference: ClassVar[bool] = False
