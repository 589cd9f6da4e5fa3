"""Fused kernels are on where they compute what the model says; each of the others says why not."""

import pytest
import torch
from torch.nn import functional

from moerl.train.megatron.fusions import FusedKernels, fusions
from moerl.types.errors import ConfigError

ALL = FusedKernels(on_gpu=True, has_rope=True, has_permutation=True, has_gradient_accumulation=True)
QWEN = {
    "params_dtype": torch.bfloat16, "activation_func": functional.silu, "gated_linear_unit": True, "add_bias_linear": False,
    "num_moe_experts": 128, "rotary_interleaved": False,
}  # fmt: skip
NEVER = {"moe_router_fusion", "masked_softmax_fusion"}


def on(kernels, **model):
    return {field for field, is_on in fusions(kernels, QWEN | model).settings().items() if is_on}


EVERY = on(ALL)


def test_a_gpu_with_everything_has_all_but_those_that_no_run_wants():
    assert {"bias_activation_fusion", "apply_rope_fusion", "moe_permute_fusion", "gradient_accumulation_fusion"} == EVERY
    assert fusions(ALL, QWEN).settings().keys() == EVERY | NEVER


@pytest.mark.parametrize(
    ("model", "off"),
    [
        ({"multi_latent_attention": True}, {"apply_rope_fusion"}),
        ({"rotary_interleaved": True}, {"apply_rope_fusion"}),
        ({"yarn_rotary_scaling_factor": 32.0}, {"apply_rope_fusion"}),
        ({"experimental_attention_variant": "dsa"}, {"apply_rope_fusion"}),
        ({"num_moe_experts": None}, {"moe_permute_fusion"}),
        ({"activation_func": functional.gelu}, {"bias_activation_fusion"}),
        ({"gated_linear_unit": False}, {"bias_activation_fusion"}),
        ({"add_bias_linear": True}, {"bias_activation_fusion"}),
        ({"activation_func_clamp_value": 7.0}, {"bias_activation_fusion"}),
        ({"glu_linear_offset": 1.0}, {"bias_activation_fusion"}),
        ({"use_te_activation_func": True}, {"bias_activation_fusion"}),
        ({"params_dtype": torch.float64}, EVERY),
    ],
    ids=lambda given: " ".join(sorted(given)),
)
def test_what_a_kernel_would_compute_otherwise_turns_it_off(model, off):
    assert on(ALL, **model) == EVERY - off


def test_what_is_not_installed_is_off_and_on_a_cpu_all_but_the_positions_of_the_reference():
    bare = FusedKernels(on_gpu=True, has_rope=False, has_permutation=False, has_gradient_accumulation=False)
    assert on(bare) == {"bias_activation_fusion"}
    cpu = FusedKernels(on_gpu=False, has_rope=True, has_permutation=True, has_gradient_accumulation=True)
    assert on(cpu) == on(cpu, params_dtype=torch.float64) == {"apply_rope_fusion"}
    assert on(cpu, multi_latent_attention=True) == on(cpu, rotary_interleaved=True) == set()


def test_a_log_names_each_with_its_reason_and_who_overrode_it():
    words = fusions(ALL, QWEN).words({"moe_permute_fusion": False, "cp_comm_type": "p2p"}).split("; ")
    assert "apply_rope_fusion on" in words
    assert "moe_permute_fusion off (train.megatron says so)" in words
    assert sum(word.startswith(tuple(NEVER)) and " off (" in word for word in words) == 2


def test_nobody_is_given_a_kernel_that_computes_another_model():
    yarn = QWEN | {"yarn_rotary_scaling_factor": 32.0}
    for kernels in (ALL, FusedKernels(on_gpu=False, has_rope=False, has_permutation=False, has_gradient_accumulation=False)):
        with pytest.raises(ConfigError, match=r"(?s)train\.megatron\.apply_rope_fusion.*YaRN"):
            fusions(kernels, yarn).check({"apply_rope_fusion": True})
        fusions(kernels, QWEN | {"multi_latent_attention": True}).check({"apply_rope_fusion": True})
        fusions(kernels, yarn).check({"apply_rope_fusion": False, "moe_router_fusion": True})
