"""Run in vLLM's environment by test_vllm_parts: each check_... prints its name, and then what was wrong if it fails."""

import ctypes
import json
import tempfile
import traceback
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
from vllm.config import SpeculativeConfig
from vllm.device_allocator import AllocationData, cumem
from vllm.device_allocator.sleep_mode_backend import CuMemBackend
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.kernels.linear import _POSSIBLE_FP8_BLOCK_KERNELS
from vllm.model_executor.kernels.linear.scaled_mm import cpu
from vllm.model_executor.kernels.linear.scaled_mm.deep_gemm import DeepGemmFp8BlockScaledMMKernel
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod
from vllm.model_executor.layers.quantization.kv_cache import KVCacheScaleParameter
from vllm.model_executor.layers.quantization.utils import fp8_utils
from vllm.model_executor.model_loader import dummy_loader
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import PlatformEnum
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.worker.gpu_worker import Worker

from moerl.config.derive.model_configs import published_config
from moerl.config.schema.rollout_config import ServerLayout
from moerl.models.fp8_blocks import quantized
from moerl.rollout.engines.engine_arguments import FP8_BLOCKS, Options, overrides
from moerl.rollout.engines.vllm import vllm_cpu, vllm_cpu_fp8
from moerl.rollout.engines.vllm.layerwise_bytes import LayerwiseBytes
from moerl.rollout.engines.vllm.vllm_core import vllm_arguments
from moerl.rollout.engines.vllm.vllm_cpu import model_arguments
from moerl.rollout.engines.vllm.vllm_sampling import advance
from moerl.rollout.engines.vllm.vllm_worker import WorkerExtension, begin_reload, check_reached, finish_reload
from moerl.types.errors import WeightError


def two_layers(*, tied=False):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, bias=False)).requires_grad_(False)
    if tied:
        model[1].weight = model[0].weight
    record_metadata_for_reloading(model)
    model.load_weights = lambda weights: [load(model, name, tensor) for name, tensor in weights]
    return model


def load(model, name, tensor):
    parameter = dict(model.named_parameters(remove_duplicate=False))[name]
    parameter.weight_loader(parameter, tensor)


def sent(value):
    return {"0.weight": torch.full((4, 4), value), "0.bias": torch.full((4,), value), "1.weight": torch.full((4, 4), value)}


def push(model, tensors):
    told = []
    installed = LayerwiseBytes(model.load_weights, lambda name, places: told.append(name))
    begin_reload(model, on_cpu=True)
    for name, tensor in tensors.items():
        installed(name, tensor)
    check_reached(model)
    with installed.watching():
        finish_reload(model, None, on_cpu=True)
    assert sorted(told) == sorted(tensors)


def check_a_push_installs_every_tensor_in_the_same_memory():
    model = two_layers()
    address = model[0].weight.data_ptr()
    push(model, sent(3.0))
    assert model[0].weight.data_ptr() == address
    assert all((parameter == 3.0).all() for parameter in model.parameters())


def check_parameters_that_got_nothing_are_named():
    tensors = sent(3.0)
    del tensors["0.bias"], tensors["1.weight"]
    reason = ""
    try:
        push(two_layers(), tensors)
    except WeightError as error:
        reason = str(error)
    assert "2 parameters of the engine's model got nothing of the push: 0.bias, 1.weight" in reason


def check_a_layer_tied_to_one_that_was_pushed_needs_nothing():
    model, tensors = two_layers(tied=True), sent(3.0)
    del tensors["1.weight"]
    push(model, tensors)
    assert (model[1].weight == 3.0).all()


class SleepingWorker(Worker, WorkerExtension):
    """vLLM's worker for GPUs with its allocator of CUDA memory, over this process's memory: what is given back is overwritten."""

    def __init__(self, model, memory):
        """`memory`: tensors by vLLM's name for their memory."""
        self.model_config = SimpleNamespace(sleep_preserve_parameter_names=[])
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(enable_nccl_comm_suspend=False))
        self.model_runner = SimpleNamespace(model=model, get_model=lambda: model, get_draft_model=lambda: None)
        self._sleep_saved_buffers, self._sleep_saved_draft_buffers, self._sleep_saved_parameters = {}, {}, {}
        self._sleep_mode_backend = CuMemBackend()
        self.allocator = object.__new__(cumem.CuMemAllocator)
        spans = {each.untyped_storage().data_ptr(): (each.untyped_storage().nbytes(), tag) for tag, all in memory.items() for each in all}
        self.allocator.pointer_to_data = {at: AllocationData((0, size, at, 0), tag) for at, (size, tag) in spans.items()}

    def synchronize_device(self):
        pass

    def on_cpu(self):
        """Context in which the allocator works without CUDA."""
        stack, copy = ExitStack(), SimpleNamespace(cudaMemcpy=ctypes.memmove)
        for target, name, value in (
            (cumem.CuMemAllocator, "get_instance", lambda: self.allocator),
            (cumem, "unmap_and_release", lambda handle: ctypes.memset(handle[2], 255, handle[1])),
            (cumem, "create_and_map", lambda handle: None),
            (cumem, "libcudart", copy),
            (torch.accelerator, "get_memory_info", lambda: (0, 0)),
            (torch.accelerator, "synchronize", lambda *_: None),
            (torch.accelerator, "empty_cache", lambda: None),
            (torch.cuda, "is_available", lambda: True),
        ):
            stack.enter_context(patch.object(target, name, value))
        stack.enter_context(patch("vllm.device_allocator.get_mem_allocator_instance", lambda: self.allocator))
        return stack

    @property
    def copied(self):
        """Names of memory of which there are copies."""
        return {data.tag for data in self.allocator.pointer_to_data.values() if data.cpu_backup_tensor is not None}


def check_a_worker_that_sleeps_keeps_no_copy_of_what_a_push_brings_and_all_else():
    model = two_layers()
    model.register_buffer("angles", torch.arange(4.0), persistent=False)
    model.scale = KVCacheScaleParameter()
    model.kernel = SimpleNamespace(strides=[torch.full((3,), 8)])  # as kernels for experts have them
    model[1].W_UV = torch.ones(4)
    graph, cache = torch.ones(5), torch.ones(6)
    weights = (*model.parameters(), model.angles, *model.kernel.strides, model[1].W_UV)
    worker = SleepingWorker(model, {"weights": weights, "runtime": [graph], "kv_cache": [cache]})
    with worker.on_cpu():
        worker.before_sleep(True)
        kept = sum(copy.nbytes for _, copy in worker._away._kept)
        worker.sleep(level=2)
        copied = worker.copied
        worker.wake_up(["weights"])
        worker.after_sleep()
        cache_sleeps = all(data.is_asleep == (data.tag == "kv_cache") for data in worker.allocator.pointer_to_data.values())
    assert (copied, cache_sleeps) == ({"runtime"}, True)
    assert kept == model.angles.nbytes + model.scale.nbytes + model.kernel.strides[0].nbytes
    assert all(parameter.isnan().all() for layer in (model[0], model[1]) for parameter in layer.parameters())
    assert model[1].W_UV.isnan().all() and cache.isnan().all() and (graph == 1).all()
    assert torch.equal(model.angles, torch.arange(4.0)) and float(model.scale) == -1 and (model.kernel.strides[0] == 8).all()
    push(model, sent(3.0))
    assert all((parameter == 3.0).all() for layer in (model[0], model[1]) for parameter in layer.parameters())


def check_a_worker_that_gives_up_its_cache_alone_copies_nothing():
    model, cache = two_layers(), torch.ones(6)
    worker = SleepingWorker(model, {"weights": list(model.parameters()), "kv_cache": [cache]})
    before = [parameter.clone() for parameter in model.parameters()]
    with worker.on_cpu():
        worker.discard(("kv_cache",))
        copied = worker.copied
        worker.wake_up(["kv_cache"])
    assert copied == set() and cache.isnan().all()
    assert all(map(torch.equal, before, model.parameters()))


def check_a_push_after_one_that_broke_off_starts_anew():
    model, tensors = two_layers(), sent(3.0)
    begin_reload(model, on_cpu=True)
    load(model, "0.weight", torch.zeros(4, 4))
    load(model, "1.weight", torch.zeros(4, 4))
    push(model, tensors)
    assert all((parameter == 3.0).all() for parameter in model.parameters())


def check_the_random_numbers_of_a_resumed_request_follow_those_it_has_used():
    sampler, logits = TopKTopPSampler(), torch.zeros(1, 50)

    def draw(generator, count):
        return [int(sampler(logits.clone(), {0: generator}, None, None)[0]) for _ in range(count)]

    whole, rest = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    expected = draw(whole, 20)
    advance(rest, 12, 50)
    assert len(set(expected)) > 5
    assert draw(rest, 8) == expected[12:]


def check_latent_attention_is_computed_by_kernels_that_know_float32_also_where_there_is_amx():
    config = SimpleNamespace(use_sparse=False, use_mla=True)
    arguments = model_arguments({"kv_lora_rank": 512}, {"num_speculative_tokens": 2})
    drafting = SpeculativeConfig._parse_attention_backend(arguments["speculative_config"].pop("attention_backend"))
    assert arguments["speculative_config"] == {"num_speculative_tokens": 2}
    with patch.object(torch.cpu, "_is_amx_tile_supported", lambda: True):
        for chosen in (AttentionBackendEnum[arguments["attention_backend"]], drafting):
            assert CpuPlatform.get_attn_backend_cls(chosen, config) == AttentionBackendEnum.CPU_MLA.get_path()


def check_more_requests_than_a_context_has_tokens_fit_into_an_iteration():
    fixed = {"dtype": "float32", "returns_routes": False, "shares_gpus": False, "pushes_mtp": False, "engine_args": {}}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(published_config("qwen3-0.6b")))
        options = Options(model=Path(folder), max_context=32, max_running=256, prefill_chunk=16, **fixed)
        arguments = vllm_arguments(options)
    assert arguments.max_num_seqs == 256 <= arguments.max_num_batched_tokens


def check_a_model_without_groups_of_heads_has_a_cache_for_every_head():
    """Published folders of Llama leave num_key_value_heads out, or have it as null."""
    model = {"num_attention_heads": 8, "head_dim": 128, "num_hidden_layers": 16}
    written: list[dict[str, int | None]] = [{}, {"num_key_value_heads": None}, {"num_key_value_heads": 8}]
    assert [vllm_cpu.cache_gib(model | groups, 2**18, 4) for groups in written] == [33, 33, 33]


def check_weights_in_fp8_are_widened_by_pytorch_also_where_there_is_amx():
    with patch.object(torch.cpu, "_is_amx_tile_supported", lambda: True), patch.object(cpu.ops, "cpu_has_amx_fp8", lambda: True):
        vllm_cpu_fp8.prepare()
        assert torch.float32 in Fp8Config.get_supported_act_dtypes()
        usable = [kernel for kernel in _POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] if kernel.is_supported()[0]]
    assert [kernel.apply_weights for kernel in usable] == [vllm_cpu_fp8._linear]


def check_a_push_in_fp8_to_kernels_of_deepgemm_is_installed_byte_by_byte():
    layer, method, kernel = torch.nn.Module(), object.__new__(Fp8LinearMethod), object.__new__(DeepGemmFp8BlockScaledMMKernel)
    kernel.use_deep_gemm_e8m0 = kernel.is_deep_gemm_supported = True
    method.fp8_linear, method.use_marlin, method.act_q_static, method.block_quant = kernel, False, False, True
    layer.quant_method, layer.weight_block_size = method, [128, 128]
    layer.weight = torch.nn.Parameter(torch.zeros(256, 256).to(torch.float8_e4m3fn), requires_grad=False)
    layer.weight_scale_inv = torch.nn.Parameter(torch.full((2, 2), 0.3), requires_grad=False)
    model = torch.nn.ModuleDict({"0": layer})
    record_metadata_for_reloading(model)
    model.load_weights = lambda weights: [load(model, name, tensor) for name, tensor in weights]
    weights = torch.zeros(256, 256)  # a block of zeros, one of tiny values, two whose largest are just above and below a power of two
    weights[:128, 128:], weights[128:, :128], weights[128:, 128:] = 1e-6, 450 / 2**12, 440 / 2**12
    values, scales = quantized(weights, "ue8m0")
    with patch.object(fp8_utils, "transform_sf_into_required_layout", lambda sf, **_: sf):  # as on Hopper (csrc/apis/layout.hpp)
        method.process_weights_after_loading(layer)
        assert float(layer.weight_scale_inv[0, 0]) == 2**-22  # others than powers of two are rounded
        push(model, {"0.weight": values, "0.weight_scale_inv": scales})
    assert layer.weight.view(torch.uint8).equal(values.view(torch.uint8)) and layer.weight_scale_inv.equal(scales)


def check_experts_that_are_repacked_in_place_are_compared_before():
    layer, method = torch.nn.Module(), object.__new__(UnquantizedFusedMoEMethod)
    torch.nn.Module.__init__(method)
    method.unquantized_backend, method.moe_kernel = UnquantizedMoeBackend.FLASHINFER_CUTLASS, object()  # as after the start
    layer.quant_method, layer.moe_config = method, SimpleNamespace(is_act_and_mul=True)
    layer.w13_weight = torch.nn.Parameter(torch.zeros(1, 4, 2), requires_grad=False)
    layer.w2_weight = torch.nn.Parameter(torch.zeros(1, 2, 2), requires_grad=False)
    layer.w13_weight.weight_loader = layer.w2_weight.weight_loader = lambda param, loaded, rows: param.data[0][rows].copy_(loaded)
    model, told = torch.nn.ModuleDict({"experts": layer}), {}
    record_metadata_for_reloading(model)
    rows = {"gate": slice(0, 2), "up": slice(2, 4), "down": slice(0, 2)}
    sent = {name: torch.arange(4.0).view(2, 2) + number for number, name in enumerate(rows)}

    def load_weights(weights):
        for name, tensor in weights:
            parameter = layer.w2_weight if name == "down" else layer.w13_weight
            parameter.weight_loader(parameter, tensor, rows[name])

    installed = LayerwiseBytes(load_weights, lambda name, places: told.update({name: [place.target.equal(sent[name]) for place in places]}))
    begin_reload(model, on_cpu=False)
    for name, tensor in sent.items():
        installed(name, tensor)
    with installed.watching():
        finish_reload(model, None, on_cpu=False)
    assert told == {name: [True] for name in sent}
    assert layer.w13_weight[0].equal(torch.cat([sent["up"], sent["gate"]])) and layer.w2_weight[0].equal(sent["down"])


def check_random_weights_of_a_start_leave_scales_of_caches():
    scale, other = KVCacheScaleParameter(), torch.zeros(3)
    dummy_loader.initialize_single_dummy_weight(scale)
    dummy_loader.initialize_single_dummy_weight(other)
    assert (float(scale), bool(other.any())) == (-1.0, True)


def check_a_published_folder_in_fp8_serves_what_a_push_brings():
    model = published_config("deepseek-v3") | {"quantization_config": FP8_BLOCKS}

    def quantization(**changed):
        arguments = {"skip_tokenizer_init": True, "load_format": "dummy", "dtype": "bfloat16", "max_model_len": 256}
        return AsyncEngineArgs(model=folder, hf_overrides=changed, **arguments).create_model_config().quantization

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(model))
        assert quantization() == quantization(**overrides(model, ServerLayout(weights="fp8"))) == "fp8"
        assert quantization(**overrides(model, ServerLayout())) is None


def outcome(check):
    try:
        check()
    except Exception:
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    checks = {name: check for name, check in globals().items() if name.startswith("check_") and check is not check_reached}
    print(json.dumps({name.removeprefix("check_"): outcome(check) for name, check in checks.items()}))
