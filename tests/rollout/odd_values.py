"""JSON that nobody should send, from a seed: drawn a hundred times faster than by hypothesis, which draws the seeds."""

import math
from random import Random

NUMBERS = (
    *range(-1, 5), 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64, 2**70, -(2**31), -(2**63), 10**400, 0.0, -0.0, 0.5, 1.0, 1e-320, 1e300, 1e309,
    -1.5, math.nan, math.inf,
)  # fmt: skip
TEXTS = ("", "r", "abort", "keep", "cache", "weights", "\x00", "\n", "é", "\U0001f600", "1", "nan", "r" * 300)


def number(random: Random):
    return random.choice(NUMBERS) if random.random() < 0.7 else random.randint(-100, 100)


def odd(random: Random, depth: int = 3):
    """A value of any kind."""
    kind = random.randrange(7 if depth else 5)
    if kind < 2:
        return number(random)
    if kind == 2:
        return random.choice(TEXTS)
    if kind < 5:
        return random.choice((None, True, False, [], {}))
    inner = [odd(random, depth - 1) for _ in range(random.randrange(4))]
    return inner if kind == 5 else {random.choice(TEXTS): value for value in inner}


def altered_once(random: Random, value, leaf=odd):
    """`value` with one part replaced by an odd one."""
    if not value or not isinstance(value, dict | list):
        return leaf(random)
    place = random.choice(list(value) if isinstance(value, dict) else range(len(value)))
    changed = dict(value) if isinstance(value, dict) else list(value)
    changed[place] = altered_once(random, value[place], leaf)
    return changed


def altered(random: Random, value, leaf=odd, share: float = 0.15):
    """`value` with a share of its parts replaced by odd ones, left out or added."""
    if random.random() < share:
        return leaf(random)
    if isinstance(value, dict):
        kept = {name: altered(random, part, leaf, share) for name, part in value.items() if random.random() > share / 4}
        return kept | ({random.choice(TEXTS): odd(random)} if random.random() < share / 2 else {})
    if isinstance(value, list):
        return [altered(random, part, leaf, share) for part in value for _ in range(random.choice((1,) * 18 + (0, 2)))]
    return value
