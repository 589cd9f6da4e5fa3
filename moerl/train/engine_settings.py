"""Settings that a training rank needs of the run's configuration. Apart from the engine, so that the driver can build it without
Megatron."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moerl.config.schema.train_config import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Parts of the run's configuration that a rank needs."""

    train: TrainConfig
    model_dir: Path
    max_context: int
    temperature: float
    uses_reference: bool
    export_dtype: str
    """Dtype of the tensors that leave for the rollout servers."""
    push_fp8: Literal["float32", "ue8m0"] | None = None
    """Those that published checkpoints quantize leave in blocks of FP8 instead, with scales of this form."""
    pushes_mtp: bool = False
    """A push brings the layers of multi-token prediction too."""
    mismatch_limit: float = math.inf
    """Mean by which a server's log-probs may differ, in nats per token."""
    model: str = "policy"
    """Name of it, for what is told of its rank."""
    is_critic: bool = False
    """The model has a value head; log-probs, reference and push are none of its verbs."""
    trains: bool = True
    """False: a rank that scores and sends. It has no optimizer, and of a checkpoint it loads the weights alone."""
