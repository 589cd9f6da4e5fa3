"""Settings that a GPU cannot carry are refused, with changes that help; layouts that large runs have published are judged as they ran."""

import json
import subprocess
import sys

import pytest
from family_cases import _DECODER, CASES

from moerl.check import load_checked
from moerl.config.compose import compose, options
from moerl.config.derive.model_configs import model_config, published_config
from moerl.config.load import build
from moerl.config.rules.facts import facts_of
from moerl.planner import layer_activations
from moerl.planner.fixed_memory import GIB
from moerl.planner.memory_plan import described, planned
from moerl.planner.verdict import gpu_problems
from moerl.types.errors import ConfigError

DEEPSEEK, QWEN = "recipe=grpo-deepseek-v3-32n8g-sync", "recipe=grpo-qwen3-235b-16n8g-sync"
GLM, KIMI = "recipe=grpo-glm-4.5-8n8g-sync", "recipe=grpo-kimi-k2-32n8g-sync"
PLAIN_LAYOUT = {
    "tp": 1, "pp": 1, "vpp": 1, "cp": 1, "ep": 1, "first_stage_layers": "null", "last_stage_layers": "null", "embedding_as_layer": "false",
    "loss_as_layer": "false",
}  # fmt: skip
VLLM = ("rollout.engine=vllm", "rollout.num_servers=8")
SHORT = ("model.max_context=1536", "data.max_prompt_tokens=512", "rollout.max_response_tokens=1024", "train.micro_batch_tokens=1536")


def cut(**sizes):
    return [f"train.layout.{name}={value}" for name, value in (PLAIN_LAYOUT | sizes).items()]


def separate(nodes):
    return ["placement.mode=separate", f"placement.nodes={nodes}", "train.offload=none"]


def on_cpu(fraction):
    return [f"train.optimizer.memory={{cpu_fraction: {fraction}, precision_aware: true}}"]


def served(gpus, fraction, **sizes):
    others = "".join(f", {name}: {value}" for name, value in ({"dp": 1, "ep": 1, "all_to_all": "gather"} | sizes).items())
    return f"rollout.layout={{gpus: {gpus}, memory_fraction: {fraction}{others}}}"


NEMO = cut(ranks=256, pp=16, ep=16, first_stage_layers=3, last_stage_layers=2)
R1 = cut(ranks=128, tp=8, pp=4, cp=4, ep=32, first_stage_layers=16, last_stage_layers=13)
PUBLISHED = {
    # name: (recipe, hardware, overrides, share of the optimizer on the host without which it does not fit)
    "DeepSeek-V3 on 256 H100": (DEEPSEEK, "h100-80", [*NEMO, "train.mtp_loss=0", *SHORT, *VLLM, served(32, 0.6)], 0),
    "DeepSeek-V3 on 256 and 256 H100": (DEEPSEEK, "h100-80", [*NEMO, "train.mtp_loss=0", *SHORT, *VLLM, served(32, 0.8), *separate(64)], 0),
    "DeepSeek-V3 on 512 H100": (
        DEEPSEEK, "h100-80",
        [*cut(ranks=512, tp=8, pp=8, cp=4, ep=32, first_stage_layers=7, last_stage_layers=6), *VLLM, served(64, 0.6), "placement.nodes=64"],
        0,
    ),
    "DeepSeek-R1 on 128 H100": (DEEPSEEK, "h100-80", [*R1, "train.mtp_loss=0", *separate(48)], 1.0),
    "DeepSeek-V3 on 96 H20": (
        DEEPSEEK, "h20-96", [*cut(ranks=96, tp=8, pp=12, ep=8, last_stage_layers=6), "train.mtp_loss=0", *separate(44)], 1.0,
    ),
    "DeepSeek-V3 on 128 H20": (
        DEEPSEEK, "h20-96", [*cut(ranks=128, tp=8, pp=16, ep=8, last_stage_layers=1), "train.mtp_loss=0", *separate(48)], 0.5,
    ),
    "DeepSeek-V3 on 256 H20": (DEEPSEEK, "h20-96", [*cut(ranks=256, tp=8, pp=16, ep=8, last_stage_layers=1), "train.mtp_loss=0"], 0),
    "DeepSeek-V3 on 512 H20": (
        DEEPSEEK, "h20-96", [*cut(ranks=512, pp=16, ep=32, last_stage_layers=1), "train.mtp_loss=0", "placement.nodes=64"], 0,
    ),
    "Qwen3-235B on 128 H100": (QWEN, "h100-80", [], 0),
    "Qwen3-235B on 64 and 64 H100": (
        QWEN, "h100-80", [*cut(ranks=64, tp=4, pp=4, cp=2, ep=16, last_stage_layers=22), "rollout.num_servers=2", *separate(16)], 0,
    ),
    "Qwen3-235B interleaved on 256 H100": (QWEN, "h100-80", ["layout=qwen3-235b-32n8g", "placement.nodes=32"], 0),
    "GLM-4.7 on 64 H100": (GLM, "h100-80", separate(16), 1.0),
    "Kimi-K2 on 256 H100": (
        KIMI, "h100-80", [*separate(64), "rollout.num_servers=8", served(32, 0.7, dp=8, ep=32, all_to_all="deepep", weights="fp8")], 1.0,
    ),
}  # fmt: skip
ONE_STAGE = cut(ranks=32, ep=16)
SEPARATE = ("placement.mode=separate", "placement.nodes=64", "train.offload=optimizer")


def refused(*overrides):
    """Path -> text of each problem."""
    with pytest.raises(ConfigError) as caught:
        load_checked(overrides)
    return {problem.path: str(problem) for problem in caught.value.problems}


def update_gib(*overrides):
    config = build(compose(overrides))
    ranks, _ = planned(model_config(config.model), config)
    return max(rank.device("update") for rank in ranks) / GIB


@pytest.mark.parametrize("recipe", options("recipe"))
def test_shipped_recipes_are_accepted(recipe):
    assert load_checked([f"recipe={recipe}"]).placement.gpu is not None or "tiny" in recipe


@pytest.mark.parametrize("name", PUBLISHED)
def test_layouts_that_ran_are_accepted_and_those_that_need_the_host_are_refused_without_it(name):
    recipe, hardware, overrides, fraction = PUBLISHED[name]
    overrides = [recipe, f"hardware={hardware}", *overrides]
    if not fraction:
        load_checked(overrides)
        return
    told = refused(*overrides)
    assert told.keys() == {"train.layout"}
    assert "train.optimizer.memory={cpu_fraction: 1.0, precision_aware: true} (" in told["train.layout"]
    load_checked([*overrides, *on_cpu(fraction)])


def test_deepseek_on_32_gpus_is_refused_with_a_layout_that_fits():
    told = refused(DEEPSEEK, *ONE_STAGE, *SEPARATE)
    assert told.keys() == {"train.layout"}
    assert "on each rank of pipeline stage 0, 0 to 31, in an update: " in told["train.layout"]
    assert "weights 110, gradients 220, optimizer 238" in told["train.layout"]
    assert "layout=deepseek-v3-32n8g, and no train.layout.* (" in told["train.layout"]


def test_every_change_that_a_refusal_names_fits():
    """One expert-parallel rank: 311 GB of experts."""
    told = refused(DEEPSEEK, "train.layout.ep=1")["train.layout"]
    fixes = [fix.rpartition(" (") for fix in told.partition("fix: ")[2].split("; or ")]
    assert [fix for fix, _, _ in fixes] == ["train.layout.ep=16", "layout=deepseek-v3-32n8g, and no train.layout.*"]
    for before, (fix, _, size) in zip((["train.layout.ep=1"], []), fixes, strict=True):
        words = fix.removesuffix(", and no train.layout.*").split()
        assert update_gib(DEEPSEEK, *before, *words) == pytest.approx(float(size.split()[0]), abs=0.06)
        load_checked([DEEPSEEK, *before, *words])


def test_changes_that_break_another_rule_are_not_named():
    """Delayed scales of FP8 cannot be recomputed; more ranks come with their nodes."""
    told = refused(QWEN, "train.recompute={kind: off}", "train.fp8={recipe: delayed, format: hybrid}")["train.layout"]
    assert "recompute" not in told.partition("fix: ")[2]
    assert (
        "train.layout.ranks=256 placement.nodes=32 ("
        in refused(GLM, "hardware=h100-80", "rollout.layout.memory_fraction=0.5")["train.layout"]
    )


def test_buffers_that_are_too_large_are_the_first_change():
    told = refused(QWEN, "weights.bucket_bytes=80000000000")["rollout.layout.memory_fraction"]
    assert "in a push" in told and "fix: weights.bucket_bytes=268435456 (" in told


def test_a_server_beside_the_trainer_must_leave_room_for_what_it_keeps_asleep():
    told = refused(QWEN, "rollout.layout.memory_fraction=0.9")
    assert told.keys() == {"rollout.layout.memory_fraction"}
    assert "while servers answer" in told["rollout.layout.memory_fraction"]
    assert "rollout.layout.memory_fraction=0.8 (" in told["rollout.layout.memory_fraction"]
    load_checked([QWEN, "rollout.layout.memory_fraction=0.8"])


def test_servers_whose_weights_do_not_fit_are_refused():
    told = refused(DEEPSEEK, "rollout.num_servers=32", "rollout.layout={gpus: 8, dp: 1, ep: 8, memory_fraction: 0.7}")
    assert "at least 162.1 GiB" in told["rollout.layout.gpus"] and "0.7 of h100-80 has 55.8" in told["rollout.layout.gpus"]
    assert "rollout.layout.gpus=32" in told["rollout.layout.gpus"]


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (
            ("recipe=grpo-qwen3-0.6b-1n1g-sync", "placement.gpu.memory_mib=2400", "rollout.layout.memory_fraction=0.4"),
            "rollout.layout.gpus=2, and fewer servers",
        ),
        ((GLM, "hardware=h100-80", "rollout.layout.memory_fraction=0.2"), "larger GPUs"),
    ],
    ids=["dense", "160 experts"],
)
def test_wider_servers_that_a_refusal_names_break_no_rule(words, fix):
    """A dense model has no experts to spread, and 160 are not spread over 64 GPUs."""
    assert f"fix: {fix}" in refused(*words)["rollout.layout.gpus"]


@pytest.mark.parametrize(("engine", "fix"), [("vllm", "larger GPUs"), ("sglang", "rollout.layout.gpus=2, with ep=2 for experts,")])
def test_wider_servers_that_a_refusal_names_can_be_started(engine, fix, tmp_path):
    """vLLM has no biases of experts in servers of several GPUs."""
    hf = _DECODER | CASES["gpt_oss"] | {"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 256}
    for name, text in {"config.json": json.dumps(hf), "tokenizer.json": "{}", "model.safetensors": ""}.items():
        (tmp_path / name).write_text(text)
    words = [f"model={{path: {tmp_path}, max_context: 64}}", f"rollout.engine={engine}", "rollout.layout.memory_fraction=0.4"]
    config = build(compose(["recipe=grpo-qwen3-0.6b-1n1g-sync", "hardware=h100-80", *words]))
    told = {problem.path: problem.fix for problem in gpu_problems(config, facts_of(config.model))}
    assert told["rollout.layout.gpus"].startswith(fix)


def test_a_server_that_fits_on_no_gpu_is_not_taken_for_a_fault_of_the_trainer():
    """No layout of the trainer's makes room for it."""
    told = refused(KIMI, "rollout.num_servers=32", "rollout.layout.gpus=8", "rollout.layout.ep=8")
    assert told.keys() == {"rollout.layout.gpus"}


def test_a_server_that_cannot_hold_one_request_is_refused():
    context = ("model.max_context=524288", "rollout.max_response_tokens=500000", "train.micro_batch_tokens=524288")
    told = refused(QWEN, *context, *separate(32), "rollout.layout.memory_fraction=0.3", "placement.gpu.host_memory_gib=null")
    assert "one request of model.max_context=524288 tokens takes 23" in told["rollout.layout.memory_fraction"]


def test_a_node_with_too_little_host_memory_is_named_with_what_it_holds():
    told = refused(DEEPSEEK, "placement.gpu.host_memory_gib=690")["placement.gpu.host_memory_gib"]
    assert "node 2 needs 699 GiB of host memory" in told
    assert "copies of what leaves the GPU 307, checkpoint staging 344, process 48" in told
    assert "checkpoint.async_save=false (355 GiB)" in told


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
    assert update_gib(DEEPSEEK, *few, "train.micro_batch_tokens=65536") == update_gib(DEEPSEEK, *few, "train.micro_batch_tokens=16384")


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_experts", "moe_intermediate_size"])
def test_a_config_json_without_what_is_needed_is_told_the_key(key, tmp_path):
    hf = published_config("qwen3-235b-a22b")
    del hf[key]
    (tmp_path / "config.json").write_text(json.dumps(hf))
    with pytest.raises(ConfigError) as caught:
        load_checked([QWEN, f"model.path={tmp_path}", "model.published=null"])
    assert any(f"needs '{key}' in config.json" in str(problem) for problem in caught.value.problems)


@pytest.mark.parametrize(
    "overrides", [["placement.mode=group_colocated"], ["placement.gpus_per_node=null"], ["rollout.layout.dp=3"], ["placement.gpu.name=''"]]
)
def test_what_another_rule_refuses_is_not_judged_and_breaks_nothing(overrides):
    assert not {"train.layout", "placement.gpu.host_memory_gib"} & refused(DEEPSEEK, *overrides).keys()


def test_an_unknown_gpu_is_answered_with_those_that_are_known():
    assert "h100-80" in refused(DEEPSEEK, "hardware=h100")["hardware"]


def test_without_a_gpu_figures_are_told_and_nothing_is_judged(monkeypatch):
    monkeypatch.setattr(layer_activations, "megatron_release", lambda: (0, 16))
    config = load_checked([DEEPSEEK, *ONE_STAGE, *SEPARATE, "placement.gpu=null"])
    assert next(described(config)).startswith("memory          589.7 GiB on a rank of stage 0 in an update")


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


def test_an_engine_inside_the_driver_has_no_collectors():
    config = load_checked(["recipe=grpo-tiny-moe-1n2g-sync", "rollout.engine=fake", "rollout.num_collectors=3"])
    told = "\n".join(described(config))
    assert "host memory" in told and "collectors" not in told


def test_a_sum_with_margin_of_another_phase_than_the_worst_is_told_with_that_phase():
    """In an update 81.1 GiB and 4.8 of margin, while servers answer 80.8 and 7."""
    config = load_checked(["recipe=grpo-qwen3-30b-a3b-1n8g-sync", "rollout.layout.memory_fraction=0.5"])
    (rank,), _ = planned(model_config(config.model), config)
    answering = (rank.device("rollout") + rank.margins["rollout"]) / GIB
    assert rank.worst == "update" and rank.device("update") + rank.margins["update"] < answering * GIB
    told = next(described(config))
    assert "in an update" in told and f"{answering:.1f} with its margin on one of stage 0 while servers answer" in told
    assert " with its margin: " in next(described(load_checked(["recipe=grpo-qwen3-30b-a3b-1n8g-sync"])))
