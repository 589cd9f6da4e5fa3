"""How vLLM itself counts the processes of a server: reads servers as JSON from stdin, writes to argv[1]. In its environment.

Of every node its own configuration is made of the arguments that moerl gives it there.
"""

import json
import sys
from dataclasses import replace

from pydantic import TypeAdapter
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map
from vllm.usage.usage_lib import UsageContext

from moerl.config.derive.model_shape import read_config
from moerl.rollout.engines.engine_arguments import Options, as_command_line
from moerl.rollout.engines.vllm import vllm_launch
from moerl.rollout.engines.vllm.vllm_core import _parser, needs_of, process_number

EXPERTS = 256


def processes(options: Options) -> list[dict]:
    """Of each process on this node: its number, and the experts that vLLM gives it and those that moerl says it needs."""
    parser = _parser()
    own = vllm_launch.arguments(options, read_config(options.model))
    args = AsyncEngineArgs.from_cli_args(parser.parse_args(as_command_line(own, parser)))
    config = args.create_engine_config(usage_context=UsageContext.ENGINE_CONTEXT, headless=options.node_rank > 0)
    parallel, found = config.parallel_config, []
    names = [f"model.layers.0.mlp.experts.{expert}.up_proj.weight" for expert in range(EXPERTS)]
    within = parallel.node_rank_within_dp * parallel.local_world_size
    for group in range(parallel.data_parallel_size_local):
        for rank in range(within, within + parallel.local_world_size):
            # As a worker of the group finds it (v1/engine/core.py, v1/executor/multiproc_executor.py).
            worker = replace_fields(parallel, data_parallel_index=parallel.data_parallel_rank + group, rank=rank)
            number, size = process_number(worker), parallel.data_parallel_size * parallel.world_size
            _, table, _ = determine_expert_map(size, number, EXPERTS, parallel.expert_placement_strategy)
            held = [expert for expert in range(EXPERTS) if table is None or table[expert] >= 0]
            needed = [names.index(name) for name in needs_of(worker, names)[number]]
            found.append({"number": number, "held": held, "needed": needed})
    return found


def replace_fields(parallel, **fields):
    copy = object.__new__(type(parallel))
    copy.__dict__.update(parallel.__dict__ | fields)
    return copy


servers = TypeAdapter(dict[str, Options]).validate_json(sys.stdin.read())
with open(sys.argv[1], "w") as out:
    found = {
        name: [processes(replace(options, node_rank=node)) for node in range(options.layout.nodes)] for name, options in servers.items()
    }
    json.dump(found, out)
