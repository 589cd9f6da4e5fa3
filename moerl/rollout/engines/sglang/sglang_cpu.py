"""Stand-ins that SGLang needs to run where there is no GPU, for the compiled packages it imports and, in float32 on CPU, never calls.

`prepare` comes before the first import of sglang, in the server and in every process it starts.
"""

import importlib.util
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from moerl.config.schema.rollout_config import ServerLayout
from moerl.rollout.engines.sglang import sglang_cpu_drafts

ARGUMENTS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "grammar_backend": "none",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "mem_fraction_static": 0.3,
    "sleep_on_idle": True,
}
"""Arguments of SGLang's server on CPU. Without sleep_on_idle its scheduler turns in a loop while there is no request, and takes a core."""

_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
_DETECTION_OPS = ("nms", "qnms")


def prepare() -> None:
    """Safe to call twice, and without sglang: its absence is reported later."""
    if importlib.util.find_spec("sglang") is None:
        return
    os.environ.update(_ENVIRONMENT)
    if "sgl_kernel" in sys.modules or importlib.util.find_spec("sgl_kernel") is not None:
        return
    sys.modules["sgl_kernel"] = _Kernels("sgl_kernel")
    sglang_cpu_drafts.prepare(sys.modules["sgl_kernel"])
    _define_operators()
    if importlib.util.find_spec("triton") is None:
        _stub_triton()


def environment(layout: ServerLayout) -> dict[str, str]:
    """This host's cores, shared out among a server's processes here: SGLang asks for that where it has more of them than NUMA nodes."""
    if layout.gpus == 1:
        return {}
    processes = min(layout.gpus, layout.gpus_per_node)
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[rank * len(cores) // processes :][: max(1, len(cores) // processes)] for rank in range(processes)]
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, share)) for share in shares)}


def after_import() -> None:
    """Once sglang is there. What its path for CPU without compiled kernels lacks: host memory that is not registered with a device; a
    length for places that data-parallel groups with shorter batches leave empty; experts that other processes hold; the gate of
    Qwen2's shared experts."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.moe import fused_moe_native
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.mem_cache.pool_host import common
    from sglang.srt.models import qwen2_moe
    from sglang.srt.models.deepseek_common import attention_backend_handler

    common.ALLOC_MEMORY_FUNCS["cpu"] = _allocate
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda _: 1  # as its other backends for CPU
    fused_moe_native.moe_forward_native = _without_others(fused_moe_native.moe_forward_native)
    qwen2_moe.fused_gate_sigmoid_mul_add = _add_gated
    factory.get_rope_cpu = _unscaled_too(factory.get_rope_cpu, factory.get_rope)
    # Its other way, for prompts, takes keys and values for those of heads, and this attention reads them from a cache of latent ones.
    attention_backend_handler.AttentionBackendRegistry.register("torch_native", attention_backend_handler._dispatch_mla_subtype)


def _unscaled_too(scaled: Callable[..., Any], unscaled: Callable[..., Any]) -> Callable[..., Any]:
    """SGLang's rotary embeddings of latent attention on CPU are those of YaRN alone."""

    def get_rope_cpu(
        head_size: int, rotary_dim: int, max_position: int, base: int, is_neox_style: bool = True, rope_scaling: Any = None, *others: Any
    ) -> Any:
        if rope_scaling is not None:
            return scaled(head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, *others)
        return unscaled(head_size, rotary_dim, max_position, base, is_neox_style)

    return get_rope_cpu


def _without_others(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """An expert of another process is number -1, which SGLang's kernels pass over: here the first one computes it, with weight 0. Every
    choice of a token is a token of its own then, because `forward` counts an expert once for a token."""

    def moe_forward_native(layer: torch.nn.Module, x: torch.Tensor, chosen: Any, config: Any) -> torch.Tensor:
        elsewhere = chosen.topk_ids < 0
        if not elsewhere.any():
            return forward(layer, x, chosen, config)
        weights, experts = chosen.topk_weights.masked_fill(elsewhere, 0), chosen.topk_ids.masked_fill(elsewhere, 0)
        apart = chosen._replace(topk_weights=weights.reshape(-1, 1), topk_ids=experts.reshape(-1, 1))
        top_k = experts.shape[1]
        return forward(layer, x.repeat_interleave(top_k, dim=0), apart, config).view(len(x), top_k, -1).sum(dim=1)

    return moe_forward_native


def _add_gated(hidden_TH: torch.Tensor, gate_H: torch.Tensor, shared_TH: torch.Tensor, out_TH: torch.Tensor) -> None:
    """As SGLang's Triton kernel (kernels/ops/elementwise/elementwise.py)."""
    out_TH += (hidden_TH.float() @ gate_H.float()).sigmoid()[:, None] * shared_TH


class _Kernels(types.ModuleType):
    """Any function of SGLang's compiled kernels; calling one says which path the CPU cannot take."""

    __version__ = "9.9.9"  # above every minimum that sglang asks for
    __path__: list[str] = []
    __spec__ = importlib.util.spec_from_loader("sgl_kernel", loader=None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args: object, **kwargs: object) -> None:
            raise NotImplementedError(f"sgl_kernel.{name} is compiled for GPUs; leave out the engine argument that leads to it")

        return missing


def _define_operators() -> None:
    vision = torch.library.Library("torchvision", "DEF")
    for name in _DETECTION_OPS:
        vision.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    kernels = torch.library.Library("sgl_kernel", "DEF")
    kernels.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
    kernels.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
    # A library's operators end with it.
    _keep.extend((vision, kernels))


_keep: list[torch.library.Library] = []


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """uint32 [rows, columns]: MurmurHash3 of (seed's low half, its high half, position, column), as SGLang's GPU kernel computes it
    (sglang/kernels/ops/sampling/murmur_hash.py). int64 throughout: torch has no arithmetic on uint32."""
    bits, low = seed.view(torch.int64)[:, None], 0xFFFFFFFF
    blocks = (bits & low, (bits >> 32) & low, positions.to(torch.int64)[:, None] & low, columns.to(torch.int64)[None, :] & low)
    state = torch.zeros((), dtype=torch.int64)
    for block in blocks:
        state = _mix(state, block)
    state = state ^ 16
    state = _times(state ^ (state >> 16), 0x85EBCA6B)
    state = _times(state ^ (state >> 13), 0xC2B2AE35)
    return (state ^ (state >> 16)).to(torch.uint32)


def _mix(state: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    block = _times(_rotate(_times(block, 0xCC9E2D51), 15), 0x1B873593)
    return (_rotate(state ^ block, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF


def _times(value: torch.Tensor, factor: int) -> torch.Tensor:
    """Modulo 2^32. In two halves, since a product of 64 bits does not fit int64."""
    return (value * (factor & 0xFFFF) + (((value * (factor >> 16)) & 0xFFFF) << 16)) & 0xFFFFFFFF


def _rotate(value: torch.Tensor, count: int) -> torch.Tensor:
    return ((value << count) | (value >> (32 - count))) & 0xFFFFFFFF


def _stub_triton() -> None:
    """Install SGLang's own stand-in, which it installs on Apple computers only."""
    package = importlib.util.find_spec("sglang")
    assert package is not None and package.origin is not None
    spec = importlib.util.spec_from_file_location("moerl_sglang_stubs", Path(package.origin).parent / "_platform_stubs.py")
    assert spec is not None and spec.loader is not None
    stubs: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = stubs
    spec.loader.exec_module(stubs)
    stubs.sys = types.SimpleNamespace(**vars(sys) | {"platform": "darwin"})
    stubs.platform = types.SimpleNamespace(machine=lambda: "arm64")
    stubs._patch_non_blocking = lambda: None
    real = sys.modules["torch"]
    fake: Any = types.ModuleType("torch")
    fake.backends, fake.mps = types.SimpleNamespace(mps=types.SimpleNamespace(is_available=lambda: True)), types.SimpleNamespace()
    sys.modules["torch"] = fake
    try:
        stubs.install_platform_stubs()
    finally:
        sys.modules["torch"] = real
    stubs.sys = sys


def _allocate(
    shape: tuple[int, ...], dtype: torch.dtype | None = None, device: str = "cpu", pin_memory: bool = False, allocator: object = None
) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)
