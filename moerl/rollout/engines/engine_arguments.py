"""Settings that a server and its engine are given, and how both are written on a command line."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from moerl.config.schema.rollout_config import ServerLayout
from moerl.models.families.parts.config_fields import num_mtp_layers
from moerl.models.find_family import find_family

FP8_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
"""quantization_config of a checkpoint in DeepSeek-V3's format."""

_OF_DEEPSEEK = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_LEFT_OUT = {"deepseek_v3": _OF_DEEPSEEK, "kimi_k2": _OF_DEEPSEEK}
"""Settings by model_type that transformers takes for granted and leaves out of the config.json it writes, where engines take others for
granted. Without the last two an engine takes a softmax router without a bias."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of one node of a server, as moerl decides them; the names are those of the hf server."""

    model: Path
    dtype: str
    max_context: int
    max_running: int
    """Requests of the whole server."""
    prefill_chunk: int
    """Tokens of each data-parallel group."""
    returns_routes: bool
    shares_gpus: bool
    """It must be able to give its memory back."""
    pushes_mtp: bool
    """Pushes bring the layers that it drafts with."""
    engine_args: Mapping[str, Any]
    layout: ServerLayout = field(default_factory=ServerLayout)
    node_rank: int = 0
    head: str = "127.0.0.1"
    """Host of node 0 of this server."""
    host: str = "127.0.0.1"
    """Address of this node, at which the other nodes of this server reach it."""


def add_options(parser: argparse.ArgumentParser, *, is_required: bool) -> None:
    """Options of every server. `is_required`: those without a default."""
    parser.add_argument("--model", type=Path, required=is_required, help="directory of a Hugging Face checkpoint")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--max-context", type=int, required=is_required, help="prompt and response together, in tokens")
    parser.add_argument("--max-running", type=int, required=is_required, help="requests decoded together")
    parser.add_argument("--prefill-chunk", type=int, required=is_required, help="prompt tokens computed per iteration")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--tls", type=Path, nargs=2, metavar=("CERTIFICATE", "KEY"), help="files in PEM; without: HTTP, not encrypted")


def server_parser(name: str) -> argparse.ArgumentParser:
    """Options of the server process of an engine with an environment of its own; `name`: as in engine_process.main."""
    parser = argparse.ArgumentParser(
        prog=f"python -m moerl.rollout.engines.{name}.{name}_server", description=f"Serve a model with {name} for rollouts."
    )
    parser.add_argument("--check", action="store_true", help="print what is wrong with --engine-args and the model, as JSON, and end")
    parser.add_argument("--model-config", type=json.loads, default="null", help="JSON of the model's config.json, for --check")
    add_options(parser, is_required=False)
    parser.add_argument("--returns-routes", action="store_true", help="requests may ask for the experts of their tokens")
    parser.add_argument("--shares-gpus", action="store_true", help="with the trainer: the server must be able to sleep")
    parser.add_argument("--pushes-mtp", action="store_true", help="pushes bring the layers it drafts with, which else are the checkpoint's")
    parser.add_argument("--engine-args", type=json.loads, default="{}", help="JSON: the engine's own arguments by name")
    parser.add_argument("--layout", type=TypeAdapter(ServerLayout).validate_json, default="{}", help="JSON: rollout.layout")
    parser.add_argument("--node-rank", type=int, default=0, help="of this process among the nodes of the server")
    parser.add_argument("--head", default="127.0.0.1", help="host of node 0")
    parser.add_argument("--head-port", type=int, help="there, where the nodes meet; default: the layout's")
    return parser


def options_of(parsed: argparse.Namespace) -> Options:
    return Options(**{name: getattr(parsed, name) for name in Options.__slots__})


def overrides(model: Mapping[str, Any], layout: ServerLayout) -> dict[str, Any]:
    """Fields that the model's configuration lacks for engines, or that are not those of what a push brings."""
    added = {name: value for name, value in _LEFT_OUT.get(model["model_type"], {}).items() if name not in model}
    if layout.weights == "fp8":
        return added | {"quantization_config": FP8_BLOCKS | {"modules_to_not_convert": _kept_modules(model)}}
    return added | ({"quantization_config": None} if "quantization_config" in model else {})


def _kept_modules(model: Mapping[str, Any]) -> list[str]:
    """Matrices that a push brings as they are and an engine would take for FP8 ones, as published folders list them."""
    block, layers = find_family(model).served.block, range(model["num_hidden_layers"] + num_mtp_layers(model))
    return ["lm_head", *(f"model.layers.{layer}.{block}.gate" for layer in layers)]


def as_command_line(arguments: Mapping[str, Any], parser: argparse.ArgumentParser | None = None) -> list[str]:
    """true: the option alone. null: none. false: its opposite if the engine has one (--no-OPTION), else none. A list: the option with
    several values. A mapping: JSON. `parser`: the engine's; None: no option has an opposite."""
    line: list[str] = []
    known = set() if parser is None else argument_names(parser)
    for name, value in arguments.items():
        option = "--" + name.replace("_", "-")
        if value is None or (value is False and f"no_{name}" not in known):
            continue
        line.append(option if value is not False else "--no-" + name.replace("_", "-"))
        if isinstance(value, bool):
            continue
        values = value if isinstance(value, list | tuple) else [value]
        line.extend(json.dumps(item) if isinstance(item, dict) else str(item) for item in values)
    return line


def argument_names(parser: argparse.ArgumentParser) -> set[str]:
    return {argument_name(option) for action in parser._actions for option in action.option_strings}


def argument_name(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")
