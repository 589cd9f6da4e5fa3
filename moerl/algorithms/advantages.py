"""Credit of a sample relative to its group: numpy, float64."""

import numpy as np

from moerl.types.groups import Group

STD_EPSILON = 1e-6


def scored(group: Group) -> np.ndarray:
    """bool [G]: the samples whose reward means something."""
    return np.array([sample.score.error is None for sample in group.samples], dtype=bool)


def grpo_advantages(rewards_G: np.ndarray, mask_G: np.ndarray) -> np.ndarray:
    """(reward - mean) / (unbiased std + 1e-6) over the samples in the mask, arXiv:2402.03300; 0 outside it and for a lone sample."""
    advantages_G = np.zeros(len(rewards_G), dtype=np.float64)
    kept = rewards_G[mask_G].astype(np.float64)
    if len(kept) >= 2:
        # Rounding in the mean of equal rewards would leave a credit near 1e-10; subtracting one of them first makes it exactly 0.
        shifted = kept - kept[0]
        centered = shifted - shifted.mean()
        advantages_G[mask_G] = centered / (centered.std(ddof=1) + STD_EPSILON)
    return advantages_G
