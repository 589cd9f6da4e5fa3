"""Makes `engine_ranks` importable, here and in the processes it starts; builds the tiny checkpoints once."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest

from moerl.config.schema import ScratchModel
from moerl.models.scratch import write_scratch_model

TINY = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn_size": 16}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Directories of a random Qwen3-MoE (8 experts, top 2) and a random dense Qwen3, by model_type."""
    root = tmp_path_factory.mktemp("checkpoints")
    for family in ("qwen3_moe", "qwen3"):
        write_scratch_model(ScratchModel(family=family, **TINY), 32, root / family, seed=0)
    return {family: root / family for family in ("qwen3_moe", "qwen3")}
