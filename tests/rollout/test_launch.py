"""What the engines of large servers are started with: kept as files, and parsed by the installed engines' own parsers."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from launch_cases import DIRECTORY, EVERYTHING, MODEL, RECIPES, arguments, cases, options, text

from moerl.config.load import build, load
from moerl.config.rules import engine_rules
from moerl.config.schema.rollout_config import ServerLayout
from moerl.config.summary import summary
from moerl.rollout.engines.engine_arguments import as_command_line, server_parser
from moerl.rollout.engines.sglang import sglang_launch as sglang
from moerl.rollout.engines.vllm import vllm_launch as vllm
from moerl.rollout.server_commands import described, server_command

CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_a_servers_arguments_are_those_that_were_reviewed(name):
    """After a change that is meant: `python tests/rollout/launch_cases.py`, and read the difference."""
    assert text(name, CASES[name]) == (DIRECTORY / f"{name}.txt").read_text()


def test_every_file_of_arguments_is_a_case():
    assert {path.stem for path in DIRECTORY.iterdir()} == set(CASES)


@pytest.mark.parametrize("launch", [sglang, vllm], ids=["sglang", "vllm"])
def test_one_process_gets_no_argument_about_others(launch):
    plain = launch.arguments(options(ServerLayout()), MODEL)
    assert not {"tp_size", "tensor_parallel_size", "nnodes", "node_rank", "ep_size", "enable_expert_parallel"} & set(plain)
    assert {launch.NAMES[setting] for setting in ("model.path", "rollout.dtype", "rollout.max_running")} <= set(plain)


def test_kernels_for_latency_have_room_for_prompts_where_these_go_through_them():
    def room(all_to_all):
        given = options(ServerLayout(gpus=8, dp=8, ep=8, all_to_all=all_to_all))
        return sglang.environment(replace(given, max_running=64, prefill_chunk=1000))["SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"]

    assert (room("deepep"), room("deepep_low_latency")) == ("128", "1000")


@pytest.mark.parametrize("launch", [sglang, vllm], ids=["sglang", "vllm"])
def test_every_field_of_a_layout_becomes_the_argument_that_the_table_names(launch):
    rendered = launch.arguments(options(replace(EVERYTHING, all_to_all="deepep_normal")), MODEL)
    assert {argument for setting, argument in launch.NAMES.items() if setting != "train.router_replay"} <= set(rendered)


@pytest.mark.parametrize("mtp_tokens", [0, 3, 4, 16])
def test_sglang_has_room_for_the_drafts_of_a_request_that_fills_the_context(mtp_tokens):
    """It reserves the tokens of two passes that check drafts."""
    given = options(ServerLayout(mtp_tokens=mtp_tokens))
    rendered = sglang.arguments(given, MODEL)
    assert rendered["context_length"] == sglang.positions_of_request(given) >= given.max_context + 2 * (mtp_tokens + 1)


@pytest.mark.parametrize(("requests", "drafts", "sizes"), [(1, 2, [3]), (20, 0, [1, 2, 4, 8, 16, 20]), (10, 1, [2, 4, 8, 16, 20])])
def test_vllm_captures_graphs_of_the_largest_batch_that_is_asked_for(requests, drafts, sizes):
    layout = ServerLayout(cuda_graph_requests=requests, mtp_tokens=drafts)
    assert vllm.arguments(options(layout), MODEL)["cudagraph_capture_sizes"] == sizes


def test_nodes_of_a_server_differ_in_their_rank_alone():
    lines = [as_command_line(arguments("sglang", options(EVERYTHING, node_rank=rank))) for rank in (0, 1)]
    differing = [pair for pair in zip(*lines, strict=True) if pair[0] != pair[1]]
    assert differing == [("0", "1")]


def test_check_prints_what_starts_every_node_as_comments_of_its_yaml():
    config = load([f"recipe={RECIPES['qwen3-235b']}"])
    text = summary(config, described(config))
    assert build(yaml.safe_load(text)) == config
    started, given, others = [line for line in text.splitlines() if line.startswith(("# node 0", "# which is", "# other nodes"))]
    assert "moerl.rollout.engines.sglang.sglang_server --model MODEL" in started and started.endswith("--node-rank 0 --head HEAD")
    assert "sglang --model-path MODEL" in given and "--attn-dp-size 4" in given and given.endswith("--dist-init-addr HEAD:25000")
    assert "--node-rank 1 to 3" in others


def test_check_prints_which_matrices_an_engine_is_told_to_keep():
    """As the server tells it: routers come as they are, where a push brings the rest in FP8."""
    config = load([f"recipe={RECIPES['kimi-k2']}", "rollout.layout.weights=fp8"])
    assert '"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"' in "".join(described(config))


def test_an_engine_without_an_environment_of_its_own_has_no_command_to_print():
    assert list(described(load(["recipe=grpo-tiny-moe-1n2g-sync"]))) == []


def test_a_servers_command_brings_its_layout_and_place_to_its_process():
    config = load([f"recipe={RECIPES['deepseek-v3']}"])
    parsed = server_parser("sglang").parse_args(server_command(config, Path("MODEL"), 2, node_rank=5, head="node-16")[3:])
    assert parsed.layout == config.rollout.layout
    assert (parsed.node_rank, parsed.head, parsed.max_running) == (5, "node-16", 1024)


# -- by the engines' own parsers, in their environments -----------------------------------------------------------

_PARSE = """
import json, sys
{imports}
parser = make()
parsed = [vars(parser.parse_args(line)) for line in json.load(sys.stdin)]
json.dump(parsed, open(sys.argv[1], "w"), default=str)
"""
_SGLANG = "from moerl.rollout.engines.sglang import sglang_server\nfrom moerl.rollout.engines.sglang.sglang_core import _parser as make"
_VLLM = """
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
make = lambda: AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(allow_abbrev=False))
"""


@pytest.mark.engine
@pytest.mark.parametrize(("engine", "imports"), [("sglang", _SGLANG), ("vllm", _VLLM)], ids=["sglang", "vllm"])
def test_the_installed_engine_takes_every_argument_with_its_value(engine, imports, tmp_path):
    python, out = Path(engine_rules.__file__).parents[3] / f".venv-{engine}" / "bin" / "python", tmp_path / "parsed.json"
    servers = {name: arguments(name, server) for name, server in CASES.items() if name.startswith(engine)}
    lines = [as_command_line(given) for given in servers.values()]
    command = [str(python), "-c", _PARSE.format(imports=imports), str(out)]
    done = subprocess.run(command, input=json.dumps(lines), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    for given, parsed in zip(servers.values(), json.loads(out.read_text()), strict=True):
        for name, value in given.items():
            if value is None or value is False:
                continue
            found = parsed[name]
            expected = str(value) if isinstance(value, Path) else value
            if isinstance(expected, dict) and isinstance(found, str):
                assert all(str(part) in found for part in expected), (name, found)
            else:
                assert found == expected, name
