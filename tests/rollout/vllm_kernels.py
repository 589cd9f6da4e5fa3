"""What vLLM itself runs the experts of servers with: reads their arguments as JSON from stdin, writes to argv[1]. In its environment.

The engine's own oracle decides, on its own platform of CUDA, whose compiled parts are named and never called.
"""

import importlib.machinery
import json
import sys
import types

import torch
from torch._ops import _OpNamespace


class Named(types.ModuleType):
    """A compiled module: every name is there."""

    __path__: list[str] = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


for name in ("_C", "_C_stable_libtorch", "_moe_C", "vllm_flash_attn", "vllm_flash_attn.flash_attn_interface"):
    sys.modules[f"vllm.{name}"] = module = Named(f"vllm.{name}")
    module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)

_found = _OpNamespace.__getattr__


def _supported(namespace, name):
    """What the compiled part supports is asked as it is imported."""
    return (lambda *_: True) if namespace.name == "_C" and "support" in name else _found(namespace, name)


_OpNamespace.__getattr__ = _supported

from vllm import platforms
from vllm.platforms.cuda import CudaPlatformBase
from vllm.platforms.interface import DeviceCapability
from vllm.utils import import_utils


class Hopper(CudaPlatformBase):
    @classmethod
    def get_device_capability(cls, device_id=0):
        return DeviceCapability(9, 0)

    @classmethod
    def get_device_name(cls, device_id=0):
        return "NVIDIA H100 80GB HBM3"


platforms._current_platform = Hopper()
import_utils.has_deep_gemm = lambda: True  # the wheel for CUDA brings it

from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
from vllm.model_executor.layers.fused_moe.oracle.fp8 import select_fp8_moe_backend
from vllm.model_executor.layers.fused_moe.oracle.unquantized import select_unquantized_moe_backend
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8Dynamic128Sym, kFp8Static128BlockSym


def kernels(arguments):
    tp, dp = arguments.get("tensor_parallel_size", 1), arguments.get("data_parallel_size", 1)
    spreads = arguments.get("enable_expert_parallel", False)
    parallel = FusedMoEParallelConfig(
        tp_size=1 if spreads else tp * dp, pcp_size=1, dp_size=dp, ep_size=tp * dp if spreads else 1, tp_rank=0, pcp_rank=0, dp_rank=0,
        ep_rank=0, sp_size=tp, use_ep=spreads, all2all_backend=arguments.get("all2all_backend", "allgather_reducescatter"),
        enable_eplb=arguments.get("enable_eplb", False),
    )  # fmt: skip
    config = FusedMoEConfig(
        num_experts=256, experts_per_token=8, hidden_dim=7168, intermediate_size=2048, num_local_experts=256 // parallel.ep_size,
        num_logical_experts=256, activation=MoEActivation.SILU, device="cpu", routing_method=RoutingMethodType.DeepSeekV3,
        moe_parallel_config=parallel, in_dtype=torch.bfloat16,
    )  # fmt: skip
    if arguments.get("quantization") != "fp8":
        return select_unquantized_moe_backend(config)[1].__name__
    # As for blocks of 128 x 128 (Fp8MoEMethod of layers/quantization/fp8.py).
    keys = {"weight_key": kFp8Static128BlockSym, "activation_key": kFp8Dynamic128Sym}
    return select_fp8_moe_backend(config, **keys, allow_vllm_cutlass=False)[1].__name__


with open(sys.argv[1], "w") as out:
    json.dump([kernels(arguments) for arguments in json.load(sys.stdin)], out)
