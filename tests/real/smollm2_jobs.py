"""What the ranks of the published model's tests do."""

from dataclasses import dataclass

import numpy as np
from engine_jobs import new_engine
from family_jobs import packed_logits, wrong_names

from moerl.train.engine_settings import EngineSettings
from moerl.types.batch import TrainBatch


@dataclass(frozen=True, kw_only=True)
class Found:
    logits: list[np.ndarray]
    """[length, vocabulary] of each sequence."""
    wrong_names: list[str]
    """Tensors that the export lacks, adds or changes."""


def load_forward_export(settings: EngineSettings, batch: TrainBatch) -> Found:
    engine = new_engine(settings)
    return Found(logits=packed_logits(engine, batch), wrong_names=wrong_names(engine, settings))
