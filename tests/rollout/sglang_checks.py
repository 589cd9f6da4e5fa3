"""Run in SGLang's environment by test_sglang_parts: each check_... prints its name, and then what was wrong if it fails."""

import json
import os
import sys
import tempfile
import traceback
import types
from contextlib import nullcontext, suppress
from pathlib import Path
from unittest.mock import patch

import torch

from moerl.rollout.engines.sglang import sglang_cpu

sglang_cpu.prepare()
sglang_cpu.after_import()

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.entrypoints import engine
from sglang.srt.layers import deep_gemm_wrapper
from sglang.srt.layers.moe import topk
from sglang.srt.layers.moe.utils import MoeRunnerBackend, RoutingMethodType
from sglang.srt.layers.quantization import fp8, fp8_utils
from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod
from sglang.srt.managers import load_snapshot, scheduler
from sglang.srt.model_loader import loader
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils import torch_memory_saver_adapter

from moerl.config.derive.model_configs import published_config
from moerl.config.schema.rollout_config import ServerLayout
from moerl.models.fp8_blocks import dequantized, quantized
from moerl.rollout.engines.dropped_weights import UnsentTensors
from moerl.rollout.engines.engine_arguments import FP8_BLOCKS, overrides
from moerl.rollout.engines.sglang import sglang_cpu_fp8, sglang_fp8, sglang_launch, sglang_scheduler, sglang_weight_memory
from moerl.rollout.engines.sglang.sglang_core import file_of_loads
from moerl.types.errors import WeightError

BLOCK = [128, 128]


def as_on_blackwell():
    """SGLang decides for DeepGEMM and its packed scales; of DeepGEMM only the layout is used, which SGLang has in PyTorch too."""
    sizes = types.ModuleType("deep_gemm.utils")
    sizes.align = lambda size, multiple: -(-size // multiple) * multiple
    sizes.get_tma_aligned_size = lambda size, width: sizes.align(size, 16 // width)
    sizes.layout = types.ModuleType("deep_gemm.utils.layout")
    sizes.layout.get_mn_major_tma_aligned_packed_ue8m0_tensor = fp8_utils._get_mn_major_tma_aligned_packed_ue8m0_tensor_torch_impl
    package = types.ModuleType("deep_gemm")
    package.utils = sizes
    sys.modules |= {"deep_gemm": package, "deep_gemm.utils": sizes, "deep_gemm.utils.layout": sizes.layout}
    deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM = deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0 = True


class Model(torch.nn.Module):
    """A linear layer of SGLang's and a stack of two experts, which are loaded by plain copies."""

    def __init__(self):
        super().__init__()
        config = fp8.Fp8Config(is_checkpoint_fp8_serialized=True, weight_block_size=BLOCK)
        self.linear, self.experts = torch.nn.Module(), torch.nn.Module()
        self.linear.tp_group, self.linear.deepgemm_mxfp8_input, self.linear.orig_dtype = None, False, torch.bfloat16
        self.method = fp8.Fp8LinearMethod(config)
        self.method.create_weights(self.linear, 512, [256], 512, 256, torch.bfloat16, weight_loader=None)
        for name, tensor in (("weight", torch.zeros(2, 256, 512).to(torch.float8_e4m3fn)), ("weight_scale_inv", torch.ones(2, 2, 4))):
            self.experts.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        self.linear.weight.data.copy_(torch.zeros(256, 512))
        self.linear.weight_scale_inv.data.fill_(1)
        self.process()

    def process(self):
        """As SGLang does after loading: Fp8LinearMethod, and what Fp8MoEMethod calls for DeepGEMM."""
        self.method.process_weights_after_loading(self.linear)
        weight, scales = self.experts.weight, self.experts.weight_scale_inv
        fp8_utils.requant_block_scale_ue8m0_for_deepgemm(
            weight, scales, BLOCK, use_deepgemm_runner=True, output_dtype=torch.bfloat16, weight_shape=(256, 512), grouped_moe=True
        )

    def matrices(self):
        """Values and scales as kernels have them, of each matrix."""
        yield self.linear.weight.data, self.linear.weight_scale_inv.data
        yield from zip(self.experts.weight.data, self.experts.weight_scale_inv.data, strict=True)


def push(model, seed):
    """What was sent to each matrix."""
    sglang_fp8.unpack(model.named_parameters())
    generator = torch.Generator().manual_seed(seed)
    sent = [quantized(torch.randn(256, 512, generator=generator) * 3, "ue8m0") for _ in range(3)]
    for (values, scales), (new_values, new_scales) in zip(model.matrices(), sent, strict=True):
        assert (scales.shape, scales.dtype) == ((2, 4), torch.float32), "a push finds scales as checkpoints have them"
        values.copy_(new_values)
        scales.copy_(new_scales)
    model.process()
    return sent


def check_kernels_of_blackwell_find_what_every_push_brought_where_they_read():
    model = Model()
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    assert model.linear.weight_scale_inv.dtype == torch.int32, "DeepGEMM's layout"
    for seed in (1, 2):
        sent = push(model, seed)
        assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
        for (values, packed), pair in zip(model.matrices(), sent, strict=True):
            scales = fp8_utils.inverse_transform_scale_ue8m0(packed, mn=256)
            assert widened(values, scales).equal(widened(*pair))


def check_a_push_after_one_that_broke_off_finds_scales_as_they_come():
    model = Model()
    sglang_fp8.unpack(model.named_parameters())
    sent = push(model, 3)
    for (values, packed), pair in zip(model.matrices(), sent, strict=True):
        assert widened(values, fp8_utils.inverse_transform_scale_ue8m0(packed, mn=256)).equal(widened(*pair))


def check_a_push_is_refused_where_kernels_keep_what_they_made_of_the_first_weights():
    model = torch.nn.ModuleDict({"one": torch.nn.Linear(1, 1), "other": torch.nn.Linear(1, 1)})
    sglang_weight_memory.check_takes_weights([model])
    model["other"]._derived_weight_cache_error = "Online weight updates are not supported with it"
    with suppress(WeightError):
        sglang_weight_memory.check_takes_weights([model])
        raise AssertionError("no error")


def check_weights_that_were_dropped_come_again_and_what_else_was_made_with_them_stays():
    saver = torch_memory_saver_adapter._TorchMemorySaverAdapterReal()
    outside = torch.ones(4)
    with patch.object(torch_memory_saver_adapter, "_memory_saver", types.SimpleNamespace(region=lambda **_: nullcontext()), create=True):
        with saver.region("weights"):
            model = Model()
            model.experts.strides = [torch.full((3,), 8)]
            model.linear.w_kc = torch.ones(4)
        with saver.region("kv_cache"):
            cache = torch.ones(4)
        with saver.region("weights", enable_cpu_backup=True):
            draft = torch.ones(4)
    made = list(sglang_weight_memory.of_weights(torch.device("cpu")))
    addresses = {each.data_ptr() for each in made}
    assert {outside.data_ptr(), cache.data_ptr(), draft.data_ptr()}.isdisjoint(addresses)
    assert {parameter.data_ptr() for parameter in model.parameters()} < addresses
    unsent = UnsentTensors(made, [*model.parameters(), *sglang_weight_memory.absorbed(model)])
    for each in made:
        each.untyped_storage().fill_(255)
    unsent.restore()
    assert (model.experts.strides[0] == 8).all() and model.linear.w_kc.isnan().all()
    sent = push(model, 4)
    for (values, packed), pair in zip(model.matrices(), sent, strict=True):
        assert widened(values, fp8_utils.inverse_transform_scale_ue8m0(packed, mn=256)).equal(widened(*pair))


def check_random_weights_of_a_start_leave_scales_of_caches():
    layer = torch.nn.Linear(4, 4)
    BaseKVCacheMethod(None).create_weights(layer)
    before = layer.weight.clone()
    loader.initialize_dummy_weights(torch.nn.Sequential(layer))
    assert not layer.weight.equal(before)
    assert (float(layer.k_scale), float(layer.v_scale)) == (-1.0, -1.0)
    BaseKVCacheMethod(None).process_weights_after_loading(layer)
    assert (layer.k_scale_float, layer.v_scale_float) == (1.0, 1.0)


def check_a_published_folder_in_fp8_serves_what_a_push_brings():
    model = published_config("deepseek-v3") | {"quantization_config": FP8_BLOCKS}

    def quantization(**changed):
        arguments = {"skip_tokenizer_init": True, "load_format": "dummy", "dtype": "bfloat16", "device": "cpu"}
        return ModelConfig.from_server_args(
            ServerArgs(model_path=folder, json_model_override_args=json.dumps(changed), **arguments)
        ).quantization

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(model))
        assert quantization() == quantization(**overrides(model, ServerLayout(weights="fp8"))) == "fp8"
        assert quantization(**overrides(model, ServerLayout())) is None


def check_its_start_leaves_how_nccl_shares_memory_to_nccl():
    """As the trainer's ranks have it, with which a push by NCCL joins servers."""
    name, value = sglang_launch.NCCL_MEMORY
    asked = types.SimpleNamespace(model_path="none", enable_memory_saver=False)
    with patch.dict(os.environ), patch.object(engine, "resolving_view", lambda args: _Off()):
        for given, left in ((None, "0"), (value, value)):
            os.environ.pop(name, None)
            if given is not None:
                os.environ[name] = given
            with suppress(Exception):  # what follows is of GPUs
                engine._set_envs_and_config(asked)
            assert os.environ[name] == left


class _Off:
    """Arguments of SGLang of which none is on."""

    nnodes = dcp_size = 1

    def __getattr__(self, name):
        return False


def check_experts_are_chosen_where_routes_are_recorded():
    def chosen_by():
        layer = topk.TopK.__new__(topk.TopK)
        torch.nn.Module.__init__(layer)
        layer.topk_config, layer._runner_backend_bound, layer.is_fp4_experts = topk.TopKConfig(top_k=2, layer_id=0), False, False
        layer.bind_runner_backend(MoeRunnerBackend.FLASHINFER_TRTLLM, routing_method_type=RoutingMethodType.Renormalize)
        return layer.topk_config.output_format

    with patch.object(topk, "_can_bypass_trtllm_routing", topk._can_bypass_trtllm_routing):
        assert chosen_by() == topk.TopKOutputFormat.BYPASSED
        arguments = types.SimpleNamespace(device="cuda", enable_return_routed_experts=True)
        with patch.object(scheduler, "run_scheduler_process"):
            sglang_scheduler.run_scheduler(arguments)
        assert chosen_by() == topk.TopKOutputFormat.STANDARD


def check_the_file_of_loads_is_found_by_either_reader():
    with tempfile.TemporaryDirectory() as folder:
        path, endpoint = f"{folder}/loads", f"ipc://{folder}/loads.sock"
        near, far = load_snapshot.ShmLoadSnapshotReader(path, 1), load_snapshot.ZmqShmLoadSnapshotReader(endpoint, path, 1)
        try:
            assert file_of_loads(near) == file_of_loads(far) == Path(path)
            assert [each.token_usage for each in far.read_all()] == [each.token_usage for each in near.read_all()]
        finally:
            far.close()


def widened(values, scales):
    return torch.cat(list(dequantized(values, scales, torch.float32)))


def outcome(check):
    try:
        check()
    except BaseException:
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    sglang_cpu_fp8.prepare()
    sglang_fp8.prepare()
    sglang_weight_memory.prepare()
    as_on_blackwell()
    checks = {name.removeprefix("check_"): check for name, check in dict(globals()).items() if name.startswith("check_")}
    print(json.dumps({name: outcome(check) for name, check in checks.items()}))
