"""Plans that are stored beside the recipes are what the code makes of these, and all fit."""

import importlib.util
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from moerl.config.compose import options
from moerl.config.load import load
from moerl.planner import layer_activations
from moerl.planner import memory_plan as memory_plan_module
from moerl.planner.fixed_memory import HOST_PROCESS
from moerl.planner.memory_plan import memory_plan

ROOT = Path(__file__).parents[2]
STORED = (0, 16)
"""Release of Megatron-Core that stored plans are for: the one that constraints.txt pins."""


def module():
    spec = importlib.util.spec_from_file_location("recipe_plans", ROOT / "tools" / "recipe_plans.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def with_megatron(monkeypatch, release):
    for user in (layer_activations, memory_plan_module):
        monkeypatch.setattr(user, "megatron_release", lambda: release)


def test_stored_plans_are_those_of_the_recipes(monkeypatch):
    with_megatron(monkeypatch, STORED)
    stored = {file.stem: file.read_text() for file in (ROOT / "configs" / "plan").iterdir()}
    assert stored == module().plans(), "python tools/recipe_plans.py writes them anew"


@pytest.mark.parametrize("release", [STORED, (0, 19)])
@pytest.mark.parametrize("recipe", [name for name in options("recipe") if "tiny" not in name])
def test_shipped_recipes_fit_their_gpus_and_nodes_with_a_margin(recipe, release, monkeypatch):
    with_megatron(monkeypatch, release)
    plan = memory_plan(load([f"recipe={recipe}"]))
    assert max(rank.most_with_margin for rank in plan.ranks) <= plan.gpu_bytes
    assert plan.worst_node.total <= plan.host_bytes
    assert plan.server.requests(plan.max_context // 2) >= plan.max_running * 3 // 5


def test_planning_memory_takes_less_than_five_seconds_and_no_torch():
    """CPU seconds, of the dearest recipe."""
    words = ["plan", "recipe=grpo-kimi-k2-32n8g-sync", "--only=memory"]
    ran = f"import sys\nsys.argv[1:] = {words}\nfrom moerl.__main__ import main\n"
    program = ran + "try:\n    main()\nfinally:\n    print('torch' in sys.modules)"
    before = _children()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
    assert "GiB of 140.4 on h200" in done.stdout
    assert _children() - before < 5


def _children():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_deepseek_r1_with_its_optimizer_on_the_host_needs_what_follows_from_its_layout():
    """16 nodes of 8 H100, of which 1.4 to 1.5 TB of host memory each are reported, with servers on the same GPUs. Terms follow from the
    layout; what is left over is named (docs/design/memory.md), not fitted."""
    cut = ["ranks=128", "tp=8", "pp=4", "cp=4", "ep=32", "first_stage_layers=16", "last_stage_layers=13"]
    memory = "train.optimizer.memory={cpu_fraction: 1.0, precision_aware: true}"
    served = ["placement.mode=separate", "placement.nodes=48", "train.offload=none", "train.mtp_loss=0"]
    plan = memory_plan(load(["recipe=grpo-deepseek-v3-32n8g-sync", *(f"train.layout.{size}" for size in cut), memory, *served]))
    node = plan.worst_node
    assert node.stages == (1,)
    # A stage of 16 layers, 8 experts of 3 x 2048 x 7168 on each of 8 ranks: parameters and moments in float32, gradients page-locked, each
    # rounded up to a power of two.
    first, second = 2 * 2048 * 7168, 2048 * 7168
    assert 2**25 < 4 * second < 2**26 < 4 * first < 2**27
    experts = 8 * 16 * 8 * (12 * (first + second) + 2**27 + 2**26)
    assert experts < node.kinds["optimizer on the CPU"] < 1.04 * experts
    # With what slime offloads beside it, which moerl refuses: weights, and those of servers of 64 GPUs.
    weights, servers = 8 * plan.ranks[1].phases["update"]["weights"], 8 * plan.server.weights
    assert 1.1e12 < node.kinds["optimizer on the CPU"] + weights + servers + 16 * HOST_PROCESS < 1.3e12
