"""`reward.terms.*.kind` and what builds its verifier. Building may import heavy packages, so it happens in the worker processes."""

from collections.abc import Callable

from moerl.config.schema.data_config import RewardTerm
from moerl.rewards import exact, format, function, gym_score, math, prefix
from moerl.rewards.verifier import Verifier

VERIFIERS: dict[str, Callable[[RewardTerm], Verifier]] = {
    "math": math.build,
    "exact": exact.build,
    "prefix": prefix.build,
    "format": format.build,
    "gym": gym_score.build,
    "function": function.build,
}
