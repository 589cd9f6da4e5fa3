"""Settings that vLLM 0.32 needs to run where there is no GPU, and which models its CPU kernels are compiled for."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from moerl.config.schema.rollout_config import ServerLayout
from moerl.types.errors import Problem, problem

ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
"""moerl's processes have one thread each, wherever the system puts it. The functions that vLLM compiles one by one (lookups, log-probs)
would run the C++ compiler at the first request, for longer than a small model ever takes for them."""

ARGUMENTS: dict[str, Any] = {
    "enforce_eager": True,
    "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
    "no_enable_chunked_prefill": True,
}
"""The compiled rotary operator is silently wrong for latent attention: log-probs are off by up to 3. After a part of a prompt vLLM takes
back what its generator drew, which torch's generators for CPU cannot."""

OWN_ARGUMENTS = dict.fromkeys(
    ("enforce_eager", "compilation_config", "enable_chunked_prefill", "device_ids"), "leave it out, or serve on a GPU"
)

_POLL_SECONDS = 1e-4
"""A token takes milliseconds."""

_LATENT_RANK, _LATENT_ROTARY = 512, 64
_EXPERT_MULTIPLE = 32
"""Divisor of hidden size and experts' inner size (CPUUnquantizedExperts.output_alignment; vLLM pads the inner size by itself)."""


def model_arguments(model: Mapping[str, Any], drafting: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Arguments of latent attention: where the processor has AMX, vLLM would take kernels that refuse float32
    (CpuPlatform.get_attn_backend_cls). The drafting layer chooses its own; `drafting` is its speculative_config, if there is one."""
    if "kv_lora_rank" not in model:
        return {}
    kernels = {"attention_backend": "CPU_MLA"}
    return kernels if drafting is None else {**kernels, "speculative_config": {**drafting, **kernels}}


def node_arguments(layout: ServerLayout) -> dict[str, Any]:
    """Arguments of a server over several nodes: its processes on one. vLLM would count devices, of which the CPU is one (MessageQueue
    in vllm/distributed/device_communicators/shm_broadcast.py), and take processes of the first node for another's."""
    if layout.nodes == 1 or layout.gpus_per_node == 1:
        return {}
    return {"device_ids": ",".join(map(str, range(layout.gpus_per_node)))}


def patch_processes() -> None:
    """Patches of vLLM's own processes where there is no GPU.

    They wait for each other's messages in loops of sched_yield. Two that did so on two cores kept the server's process from answering,
    /health also, for as long as a request ran (Linux 6.18): they sleep. And segments by which tensor-parallel workers exchange tensors lose
    their names once all of them have opened them: vLLM does so as a worker ends by itself, and kill -9 left 4 MB of each in /dev/shm.
    """
    if torch.cuda.is_available():
        return
    from vllm.distributed.device_communicators import cpu_communicator, shm_broadcast

    shm_broadcast.sched_yield = lambda: time.sleep(_POLL_SECONDS)
    shared: Any = cpu_communicator._CPUSHMDistributed
    init = shared._init_cpu_shm

    def init_and_unlink(communicator: Any) -> int:
        handle: int = init(communicator)  # ends with a barrier
        for segment in Path("/dev/shm").iterdir():
            if segment.name.startswith(f"{communicator.group_name}_"):
                segment.unlink(missing_ok=True)
        return handle

    shared._init_cpu_shm = init_and_unlink


def cache_gib(model: Mapping[str, Any], num_positions: int, bytes_per_number: int) -> int:
    """GiB that vLLM must keep for the keys and values of `num_positions` tokens."""
    if "kv_lora_rank" in model:
        numbers = model["kv_lora_rank"] + model["qk_rope_head_dim"]
    else:
        groups = model.get("num_key_value_heads")  # null, or not written: each head has its own
        numbers = 2 * (model["num_attention_heads"] if groups is None else groups) * _head_size(model)
    return 1 + numbers * model["num_hidden_layers"] * num_positions * bytes_per_number // 2**30


def model_problems(model: Mapping[str, Any]) -> Iterator[Problem]:
    """vLLM itself finds out as it loads the model, or when the first request comes, and ends."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if "kv_lora_rank" in model:
        found = (model["kv_lora_rank"], model["qk_rope_head_dim"])
        if found != (_LATENT_RANK, _LATENT_ROTARY):
            yield _problem(f"kv_lora_rank and qk_rope_head_dim = {found}", f"must be {_LATENT_RANK} and {_LATENT_ROTARY}")
    elif _head_size(model) not in sizes:
        yield _problem(f"head_dim = {_head_size(model)}", f"must be one of {', '.join(map(str, sizes))}")
    has_experts = any(model.get(name) for name in ("n_routed_experts", "num_experts", "num_local_experts"))
    if has_experts and model["hidden_size"] % _EXPERT_MULTIPLE:
        yield _problem(f"hidden_size = {model['hidden_size']}", f"must be a multiple of {_EXPERT_MULTIPLE} in a model with experts")


def _head_size(model: Mapping[str, Any]) -> int:
    size = model.get("head_dim")
    return model["hidden_size"] // model["num_attention_heads"] if size is None else size


def _problem(value: str, rule: str) -> Problem:
    reason = "vLLM's kernels for CPU are compiled for these sizes only"
    return problem("model", value, rule, reason, "rollout.engine=hf, or a server on a GPU")
