"""A training step on 1, 2 and 8 GPUs with the real Transformer Engine equals the reference on CPU up to rounding.

Not run on a GPU so far; tests/train/test_step_of_a_device.py runs the same comparison with a rank on CPU.
"""

from pathlib import Path

import pytest
import torch
from engine_cases import LAYOUTS
from step_cases import check_step, write_models

from moerl.config.schema.layout import Layout

pytestmark = pytest.mark.gpu


def case(name: str, family: str, layout: Layout, fp8: str | None = None):
    has_enough = torch.cuda.device_count() >= layout.ranks
    return pytest.param(family, layout, fp8, id=name, marks=pytest.mark.skipif(not has_enough, reason=f"needs {layout.ranks} NVIDIA GPUs"))


CASES = [
    *(case(f"{family}-one", family, Layout()) for family in ("qwen3_moe", "deepseek_v3")),
    *(case(f"fp8-{recipe}", "qwen3_moe", Layout(), recipe) for recipe in ("blockwise", "tensorwise")),
    *(case(name, "qwen3_moe", LAYOUTS[name]) for name in ("tp2", "ep2", "pp2", "cp2", "tp2-ep2", "tp2-etp2")),
    *(case(f"latent-{name}", "deepseek_v3", LAYOUTS[name]) for name in ("tp2-ep2", "cp2")),
    case("fp8-tp2-ep2", "qwen3_moe", LAYOUTS["tp2-ep2"], "blockwise"),
    *(case(name, "qwen3_moe", LAYOUTS[name]) for name in ("tp2-pp2-ep2-dp2", "tp2-pp2-vpp2-cp2-ep4")),
    case("latent-tp2-pp2-ep2-dp2", "deepseek_v3", LAYOUTS["tp2-pp2-ep2-dp2"]),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(("family", "layout", "fp8"), CASES)
def test_a_step_is_off_from_float32_by_no_more_than_the_reference_is_in_the_same_precision(models, family, layout, fp8):
    check_step(models[family], layout, fp8)
