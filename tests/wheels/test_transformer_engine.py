"""Megatron builds on Transformer Engine's own Python what it builds on the reference: classes and keywords are there, names alike."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from distributions import unpacked

from moerl.train.megatron.attention_backend import CHOICE

pytestmark = pytest.mark.wheels

ROOT = Path(__file__).parents[2]
VERSION = re.search(r"^transformer-engine==(.+)$", (ROOT / "locks" / "trainer-sglang.txt").read_text(), re.MULTILINE)[1]
RECIPES = ["grpo-qwen3-235b-16n8g-sync", "grpo-kimi-k2-32n8g-sync", "grpo-glm-4.5-8n8g-sync"]


def held(recipe: str, folder: str, *overrides: str) -> dict:
    command = [sys.executable, "-W", "ignore", str(Path(__file__).parent / "te_ranks.py"), folder, f"recipe={recipe}", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("grpo-deepseek-v3-32n8g-sync", []),
        pytest.param("grpo-deepseek-v3-32n8g-sync", ["train.fp8={recipe: blockwise}"], marks=pytest.mark.matrix("fp8")),
        *(pytest.param(name, [], marks=pytest.mark.matrix(name)) for name in RECIPES),
    ],
    ids=lambda value: value if isinstance(value, str) else "".join(value) or "bf16",
)
def test_ranks_hold_on_transformer_engine_what_they_hold_on_the_reference(recipe, overrides):
    real, reference = (held(recipe, folder, *overrides) for folder in (str(unpacked("transformer-engine", VERSION)), "reference"))
    assert Path(real["file"]).is_relative_to(unpacked("transformer-engine", VERSION))
    assert real["stages"] == reference["stages"] and len(real["stages"]) >= 2
    # Megatron has found the kernels in the distribution, and built its layers with them.
    rotations = [] if is_latent(recipe) else ["apply_rope_fusion"]
    assert real["fused"] == ["bias_activation_fusion", *rotations, "moe_permute_fusion"]
    assert reference["fused"] == rotations


def is_latent(recipe):
    return "deepseek" in recipe or "kimi" in recipe


def test_copies_of_weights_in_fp8_are_where_they_are_dropped_and_are_made_anew():
    """Every module looks them up in `_fp8_workspaces`; without one the weight is quantized, in whichever micro-batch."""
    folder = unpacked("transformer-engine", VERSION) / "transformer_engine" / "pytorch" / "module"
    for name in ("linear", "layernorm_linear", "layernorm_mlp", "grouped_linear"):
        nodes = list(ast.walk(ast.parse((folder / f"{name}.py").read_text())))
        uses = [ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute | ast.Subscript)]
        assert "self._fp8_workspaces.get" in uses and any(use.startswith("self._fp8_workspaces[") for use in uses), name
    base = ast.parse((folder / "base.py").read_text())
    (function,) = [node for node in base.body if isinstance(node, ast.FunctionDef) and node.name == "quantize_weight"]
    function.returns = None
    for argument in function.args.kwonlyargs:
        argument.annotation = None
    names = {"QuantizedTensor": type("QuantizedTensor", (), {})}
    exec(compile(ast.Module([function], []), "base.py", "exec"), names)
    quantizer = SimpleNamespace(internal=True, quantize=lambda tensor, dtype: f"{tensor} in FP8")
    made = names["quantize_weight"](tensor="weight", quantizer=quantizer, workspace=None, update_workspace=False, cache=True)
    assert made == ("weight in FP8", "weight in FP8")


def test_its_adam_counts_the_steps_of_groups_without_parameters_as_the_reference_does():
    """And makes moments of what has no gradient: Muon, which steps in its place, sets the count and hides its matrices."""
    file = unpacked("transformer-engine", VERSION) / "transformer_engine" / "pytorch" / "optimizers" / "fused_adam.py"
    (step,) = (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef) and node.name == "step")
    tests = [ast.unparse(node.test) for node in ast.walk(step) if isinstance(node, ast.If)]
    assert tests.index("'step' in group") < tests.index("len(group['params']) == 0")
    assert tests.index("len(state) == 0") < tests.index("p_grad is None")


def test_its_module_says_which_attention_it_has_chosen():
    """What a rank logs is read there."""
    file = unpacked("transformer-engine", VERSION).joinpath(*CHOICE.split(".")).with_suffix(".py")
    kept = {
        node.slice.value
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "_attention_backends" and isinstance(node.slice, ast.Constant)
    }
    assert kept >= {
        "use_flash_attention", "flash_attention_backend", "use_fused_attention", "fused_attention_backend", "use_unfused_attention"
    }  # fmt: skip
