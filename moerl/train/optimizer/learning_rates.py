"""The learning rate as a pure function of the step, so that resuming needs no scheduler state."""

import math

from moerl.config.schema.train_config import OptimizerConfig


def learning_rate(step: int, config: OptimizerConfig, num_steps: int) -> float:
    """Learning rate of step `step`, counted from 0, in a run of `num_steps`.

    Warm-up: step s < W uses lr * (s + 1) / W. Decay: lr at step W, min_lr at num_steps and after.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.decay == "constant":
        return config.lr
    progress = 1.0 if step >= num_steps else (step - config.warmup_steps) / (num_steps - config.warmup_steps)
    remaining = 1 - progress if config.decay == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.min_lr + (config.lr - config.min_lr) * remaining
