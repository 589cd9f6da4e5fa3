from pathlib import Path

import pytest

from moerl.config.schema.model_config import ScratchModel
from moerl.scratch_model import write_scratch_model


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scratch mixture-of-experts model with two small layers."""
    directory = tmp_path_factory.mktemp("scratch") / "model"
    write_scratch_model(ScratchModel(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, ffn_size=16), 256, directory, 0)
    return directory


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint)
