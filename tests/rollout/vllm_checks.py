"""Run in vLLM's environment by test_vllm_parts: each check_... prints its name, and then what was wrong if it fails."""

import json
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace

import torch
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.layers.quantization.kv_cache import KVCacheScaleParameter
from vllm.model_executor.model_loader import dummy_loader
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from moerl.config.derive.model_configs import published_config
from moerl.config.schema.rollout_config import ServerLayout
from moerl.rollout.engines.engine_arguments import FP8_BLOCKS, overrides
from moerl.rollout.engines.vllm.layerwise_bytes import LayerwiseBytes
from moerl.rollout.engines.vllm.vllm_cpu import model_arguments
from moerl.rollout.engines.vllm.vllm_sampling import advance
from moerl.rollout.engines.vllm.vllm_worker import begin_reload, check_reached, finish_reload
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
    chosen = AttentionBackendEnum[model_arguments({"kv_lora_rank": 512})["attention_backend"]]
    has_amx, torch.cpu._is_amx_tile_supported = torch.cpu._is_amx_tile_supported, lambda: True
    try:
        assert CpuPlatform.get_attn_backend_cls(chosen, config) == AttentionBackendEnum.CPU_MLA.get_path()
    finally:
        torch.cpu._is_amx_tile_supported = has_amx


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
