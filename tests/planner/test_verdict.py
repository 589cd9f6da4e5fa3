"""Settings that a GPU cannot carry are refused, with changes that help; those of the shipped recipes are not."""

import subprocess
import sys

import pytest

from moerl.check import load_checked
from moerl.config.compose import compose, options
from moerl.config.derive.model_configs import model_config
from moerl.config.load import build
from moerl.planner.memory import GIB, described, rank_memory, server_memory, table
from moerl.types.errors import ConfigError

DEEPSEEK = "recipe=grpo-deepseek-v3-32n8g-sync"
ONE_STAGE = ("train.layout.ranks=32", "train.layout.pp=1", "train.layout.first_stage_layers=null", "train.layout.last_stage_layers=null")
SEPARATE = ("placement.mode=separate", "placement.nodes=64", "train.offload=optimizer")
CPU_ADAM = ("train.offload=none", "train.optimizer.memory={cpu_fraction: 1.0, precision_aware: true}")
R1 = (
    "layout={ranks: 128, tp: 8, pp: 4, cp: 4, ep: 32, first_stage_layers: 16, last_stage_layers: 13}", "train.mtp_loss=0",
    "placement.mode=separate", "placement.nodes=48", "train.offload=none",
)  # fmt: skip
"""DeepSeek-R1 on 128 H100, as it is run with the optimizer on the host."""


def refused(*overrides):
    """Path -> text of each problem."""
    with pytest.raises(ConfigError) as caught:
        load_checked(overrides)
    return {problem.path: str(problem) for problem in caught.value.problems}


def gib(*overrides):
    config = build(compose(overrides))
    hf = model_config(config.model)
    return max(each.device for each in rank_memory(hf, config)) / GIB, server_memory(hf, config).weights / GIB


@pytest.mark.parametrize("recipe", options("recipe"))
def test_shipped_recipes_fit_their_gpus(recipe):
    config = load_checked([f"recipe={recipe}"])
    assert config.placement.gpu is not None or "tiny" in recipe
    assert table(config).count("\n") == 1 + config.train.layout.pp


def test_deepseek_on_32_gpus_is_refused_with_a_layout_that_fits():
    told = refused(DEEPSEEK, *ONE_STAGE, *SEPARATE)
    assert told.keys() == {"train.layout"}
    assert "on each rank of pipeline stage 0 during an update" in told["train.layout"]
    assert "weights 110, gradients 220, optimizer 238" in told["train.layout"]
    assert "fix: layout=deepseek-v3-32n8g (" in told["train.layout"]


def test_one_expert_parallel_rank_is_refused_and_every_change_it_is_told_fits():
    told = refused(DEEPSEEK, "train.layout.ep=1")["train.layout"]
    fixes = [fix.rpartition(" (")[0].split() for fix in told.partition("fix: ")[2].split("; or ")]
    assert fixes == [["train.layout.ep=8"], ["layout=deepseek-v3-32n8g"]]
    for fix in fixes[:1]:
        needed, _ = gib(DEEPSEEK, "train.layout.ep=1", *fix)
        assert needed < 79.6


def test_servers_whose_weights_do_not_fit_are_refused():
    told = refused(DEEPSEEK, "rollout.num_servers=32", "rollout.layout={gpus: 8, dp: 1, ep: 8, memory_fraction: 0.7}")
    assert told.keys() == {"rollout.layout.gpus"}
    assert "at least 156.2 GiB" in told["rollout.layout.gpus"] and "0.7 of h100-80 has 55.8" in told["rollout.layout.gpus"]
    assert "rollout.layout.gpus=32" in told["rollout.layout.gpus"]


def test_an_optimizer_on_the_host_makes_a_layout_fit():
    """Which the message names first that can: with one expert-data-parallel rank states are not cut."""
    layout = (DEEPSEEK, *R1[1:], *(f"train.layout.{part.strip().replace(': ', '=')}" for part in R1[0][8:-1].split(",")))
    told = refused(*layout)
    assert "train.optimizer.memory={cpu_fraction: 1.0, precision_aware: true}" in told["train.layout"]
    assert load_checked([*layout, *CPU_ADAM[1:]]).train.optimizer.memory.cpu_fraction == 1.0


@pytest.mark.parametrize(
    ("hardware", "overrides", "path", "said"),
    [
        ("a100-80", ["train.fp8={recipe: blockwise}"], "train.fp8.recipe", "needs compute capability 9.0, and a100-80 has 8.0"),
        ("h100-80", ["train.fp8={recipe: mxfp8}"], "train.fp8.recipe", "train.fp8.recipe=blockwise or tensorwise or delayed"),
        ("h100-80", ["placement.nodes_per_domain=4"], "placement.nodes_per_domain", "would join 32 GPUs by NVLink, and h100-80 joins 8"),
        ("{name: mine, memory_mib: 40960, capability: 9.0, gpus_per_domain: 8}", [], "train.layout", "of mine"),
    ],
)
def test_a_gpu_judges_formats_domains_and_memory(hardware, overrides, path, said):
    gpu = f"hardware={hardware}" if hardware.isalnum() or "-" in hardware else f"placement.gpu={hardware}"
    assert said in refused(DEEPSEEK, gpu, *overrides)[path]


def test_a_micro_batch_that_no_update_fills_is_not_counted_as_full():
    few = ("groups_per_step=16", "group_size=1")
    assert gib(DEEPSEEK, *few, "train.micro_batch_tokens=65536") == gib(DEEPSEEK, *few)


def test_an_unknown_gpu_is_answered_with_those_that_are_known():
    assert "h100-80" in refused(DEEPSEEK, "hardware=h100")["hardware"]


def test_without_a_gpu_figures_are_told_and_nothing_is_judged():
    config = load_checked([DEEPSEEK, *ONE_STAGE, *SEPARATE, "placement.gpu=null"])
    assert next(described(config)).startswith("memory          at least 584 GiB on a rank of stage 0")


def test_a_refusal_needs_no_torch():
    program = (
        "import sys\n"
        "from moerl.check import load_checked\n"
        "from moerl.types.errors import ConfigError\n"
        "try:\n"
        f"    load_checked({[DEEPSEEK, 'train.layout.ep=1']})\n"
        "except ConfigError as error:\n"
        "    print(len(error.problems), 'torch' in sys.modules, 'numpy' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "1 False False\n"
