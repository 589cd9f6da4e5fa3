"""What SGLang itself runs the experts of servers with: reads their arguments as JSON from stdin, writes to argv[1]. In its environment.

The engine's own classes decide, on what its distribution finds on a GPU (DeepGEMM is there); only weights are not made.
"""

import json
import sys
from unittest import mock

from moerl.rollout.engines.sglang import sglang_server  # noqa: F401  # before SGLang, as in a server's process

# isort: split
import torch
from sglang.srt.layers import deep_gemm_wrapper
from sglang.srt.layers.moe import utils as moe
from sglang.srt.layers.moe.ep_moe import layer
from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig, PermuteMethodPool
from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.runtime_context import get_flags

FORMATS = {"normal": ["deepep_normal"], "low_latency": ["deepep_ll"], "auto": ["deepep_normal", "deepep_ll"]}
SIZES = {"num_experts": 8, "top_k": 2, "hidden_size": 8, "intermediate_size": 8, "layer_id": 0}


def runner(arguments: dict) -> str:
    """Name of the runner that takes the tokens which DeepEP brings; else why none does."""
    flags = get_flags().moe
    flags.a2a_backend = moe.MoeA2ABackend(arguments["moe_a2a_backend"])
    flags.runner_backend = moe.resolve_moe_runner_backend(arguments.get("moe_runner_backend", "auto"))
    quantized = None
    if arguments.get("quantization") == "fp8":
        quantized = Fp8Config(is_checkpoint_fp8_serialized=True, weight_block_size=[128, 128])

    def without_weights(self, **sizes):
        torch.nn.Module.__init__(self)
        self.runner_backend = flags.runner_backend
        self.w13_weight = torch.empty(0, dtype=torch.bfloat16)

    with mock.patch.object(layer.FusedMoE, "__init__", without_weights):
        experts = layer.get_moe_impl_class(quantized)(**SIZES, quant_config=quantized)
    if not experts.deprecate_flag:
        return "none: run_moe_core of ep_moe/layer.py refuses"
    method = Fp8MoEMethod(quantized) if quantized else UnquantizedFusedMoEMethod(use_deep_gemm=flags.runner_backend.is_deep_gemm())
    method.create_moe_runner(experts, MoeRunnerConfig())
    name = method.runner.runner_backend.value
    for tokens in FORMATS[arguments["deepep_mode"]]:
        PermuteMethodPool.get_pre_permute(tokens, name)  # each raises if there is none
        PermuteMethodPool.get_post_permute(name, tokens)
    return name


deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM = True
with open(sys.argv[1], "w") as out:
    json.dump([runner(arguments) for arguments in json.load(sys.stdin)], out)
