"""`reward.terms.*.kind` and what builds its verifier. Building may import heavy packages, so it happens in the worker processes."""

from collections.abc import Callable

from moerl.config.schema import RewardTerm
from moerl.rewards import exact, format, function, gym, math, prefix
from moerl.rewards.verifier import Verifier

VERIFIERS: dict[str, Callable[[RewardTerm], Verifier]] = {
    "math": math.build,
    "exact": exact.build,
    "prefix": prefix.build,
    "format": format.build,
    "gym": gym.build,
    "function": function.build,
}
