"""The comparison that tests/gpu makes of a training step on GPUs, which have not run, with a rank on CPU in their place."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))

from step_cases import check_step, write_models

from moerl.config.schema.layout import Layout


def test_a_step_of_a_rank_on_cpu_is_off_from_float32_by_no_more_than_the_reference(tmp_path):
    check_step(write_models(tmp_path)["qwen3_moe"], Layout())
