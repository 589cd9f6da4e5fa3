"""Every family in Megatron: the logits of transformers under every layout, every bit of a checkpoint back; the hf engine serves it."""

import asyncio
import functools
import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from engine_cases import random_batch, settings
from engine_jobs import train
from engine_ranks import run_ranks
from family_cases import BUILT, CASES, transformers_logits, write_case
from family_jobs import prove
from hf_trainer import HFTrainGroup
from safetensors.torch import load_file

from moerl.algorithms.mini_batch_loss import loss_of
from moerl.config.algorithm_settings import algorithm
from moerl.config.derive.model_shape import shape_of_config
from moerl.config.schema.layout import Layout
from moerl.convert.sharded.expected_tensors import expected_tensors
from moerl.models.expert_stacks import stored_name
from moerl.models.families.family_table import FAMILIES
from moerl.models.families.parts.config_fields import is_tied, num_mtp_layers
from moerl.models.transformers_config import read_transformers_config
from moerl.rollout.engines.hf.forward import Forward
from moerl.rollout.engines.hf.hf_model import checkpoint_specs, checkpoint_views, load_model

LAYOUTS = {
    "one": Layout(),
    "tp2": Layout(ranks=2, tp=2),
    "pp2": Layout(ranks=2, pp=2),
    "ep2": Layout(ranks=2, ep=2),
    "etp2": Layout(ranks=2, etp=2),
    "tp2-pp2-ep2-etp2": Layout(ranks=8, tp=2, pp=2, ep=2, etp=2),
    "tp2-pp2-ep2": Layout(ranks=4, tp=2, pp=2, ep=2),
    "cp2": Layout(ranks=2, cp=2),
}
DENSE = [name for name, config in CASES.items() if not any("expert" in key for key in config)]
MTP = [name for name, config in CASES.items() if config.get("num_nextn_predict_layers")]
BIASED = [name for name, config in CASES.items() if config["model_type"] == "gpt_oss"]
"""Megatron has no biases of experts under expert tensor parallelism: their product is the one without."""
INDEXED = [name for name, config in CASES.items() if config.get("index_topk")]
DELTA = [name for name, config in CASES.items() if config["model_type"] == "qwen3_next"]


def _is_proven(name, layout):
    sizes = LAYOUTS[layout]
    if layout == "tp2-pp2-ep2":
        return name in BIASED
    if name in DELTA:
        return sizes.tp == 1
    return (name not in DENSE or sizes.ep * sizes.etp == 1) and (name not in BIASED or sizes.etp == 1)


PROVEN = [(name, layout) for layout in LAYOUTS for name in BUILT if _is_proven(name, layout)]
ATOL = 2e-5
_GPT_OSS_ROPE = CASES["gpt_oss"]["rope_scaling"]
BATCH = random_batch(num_sequences=7)
SEQUENCES = [BATCH.token_ids_T[start:end].tolist() for start, end in pairwise(BATCH.offsets)]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    return {name: write_case(name, root) for name in CASES}


@pytest.fixture(scope="module")
def proofs(directories):
    """From a layout to what its ranks found, by case. All cases of a layout share its processes."""

    @functools.cache
    def of(layout):
        names = [name for name, under in PROVEN if under == layout]
        chosen = [settings(directories[name], LAYOUTS[layout]) for name in names]
        chosen = [
            replace(one, train=replace(one.train, mtp_loss=0.3)) if name in MTP else one for name, one in zip(names, chosen, strict=True)
        ]
        chosen = [
            replace(one, train=replace(one.train, megatron={"cp_comm_type": "all_gather"})) if name in INDEXED and "cp" in layout else one
            for name, one in zip(names, chosen, strict=True)
        ]
        return dict(zip(names, run_ranks(prove, LAYOUTS[layout].ranks, chosen, BATCH), strict=True))

    return of


@pytest.fixture(scope="module")
def expected(directories):
    return functools.cache(lambda name: [logits.numpy() for logits in transformers_logits(directories[name], SEQUENCES)])


def test_every_family_has_a_case():
    assert {config["model_type"] for config in CASES.values()} == FAMILIES.keys()


@pytest.mark.parametrize("name", BUILT)
def test_a_config_json_that_transformers_5_wrote_describes_the_same_model(name, directories, tmp_path):
    """It has other names for some settings, and writes those that have their default."""
    read_transformers_config(directories[name]).save_pretrained(tmp_path)
    published, written = (json.loads((directory / "config.json").read_text()) for directory in (directories[name], tmp_path))
    family = FAMILIES[published["model_type"]]
    assert family.checked_config(written) == family.checked_config(published)
    assert family.rotary(written) == family.rotary(published)
    assert (is_tied(written), num_mtp_layers(written)) == (is_tied(published), num_mtp_layers(published))
    shape = shape_of_config(published)
    assert shape_of_config(written | {"model_type": shape.model_type}) == shape


@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name, layout in PROVEN if layout != "cp2"])
def test_logits_equal_those_of_transformers_at_every_position_padded_and_packed(name, layout, proofs, expected):
    proof = proofs(layout)[name]
    for packed, padded, wanted in zip(proof.packed, proof.padded, expected(name), strict=True):
        np.testing.assert_allclose(packed, wanted, atol=ATOL, rtol=0)
        np.testing.assert_allclose(padded, wanted, atol=ATOL, rtol=0)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}),
        ("qwen3_moe", {"norm_topk_prob": True}),
        ("llama-3.1", {"rope_scaling": None}),
        ("deepseek_v3", {"rope_scaling": None}),
        ("deepseek_v3", {"topk_group": 4}),
        ("deepseek_v32", {"index_topk": 32}),
        ("glm_moe_dsa", {"index_topk": 32}),
        ("kimi_k2", {"rope_scaling": None}),
        ("kimi_k2", {"routed_scaling_factor": 2.5}),
        ("gpt_oss", {"sliding_window": 32}),
        ("gpt_oss", {"layer_types": ["sliding_attention"] * 4}),
        ("gpt_oss", {"swiglu_limit": 7.0}),
        ("gpt_oss", {"rope_scaling": _GPT_OSS_ROPE | {"factor": 2.0}}),
        ("gpt_oss", {"rope_scaling": _GPT_OSS_ROPE | {"truncate": True}}),
        ("minimax_m2", {"rotary_dim": 16}),
        ("qwen3_next", {"partial_rotary_factor": 0.5}),
        ("qwen3_next", {"norm_topk_prob": False}),
        ("glm4_moe", {"partial_rotary_factor": 1.0}),
        ("glm4_moe", {"use_qk_norm": False}),
        ("glm4_moe", {"attention_bias": False}),
        ("glm4_moe-air", {"topk_group": 4}),
        ("glm4_moe-air", {"norm_topk_prob": False}),
    ],
)
def test_what_a_config_json_says_of_a_case_moves_its_logits_far_beyond_the_tolerance(name, change, directories, expected, tmp_path):
    """Otherwise equal logits would not prove that Megatron does what it says."""
    config = json.loads((directories[name] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    (tmp_path / "model.safetensors").symlink_to(directories[name] / "model.safetensors")
    assert _distance(transformers_logits(tmp_path, SEQUENCES), expected(name)) > 50 * ATOL


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("qwen2", "q_proj.bias"), ("qwen2", "v_proj.bias"), ("qwen2_moe", "shared_expert_gate.weight"), ("glm4_moe", "k_proj.bias"),
        ("gpt_oss", "self_attn.sinks"), ("gpt_oss", "router.bias"), ("gpt_oss", "gate_up_proj_bias"), ("gpt_oss", "down_proj_bias"),
        ("gpt_oss", "o_proj.bias"), ("glm4_moe", "e_score_correction_bias"), ("kimi_k2", "e_score_correction_bias"),
        ("kimi_k2", "shared_experts.down_proj.weight"), ("minimax_m2", "e_score_correction_bias"),
        ("qwen3_next", "dt_bias"), ("qwen3_next", "A_log"), ("qwen3_next", "conv1d.weight"), ("qwen3_next", "shared_expert_gate.weight"),
        ("deepseek_v32", "indexer.k_norm.bias"), ("glm_moe_dsa", "indexer.weights_proj.weight"),
    ],
)  # fmt: skip
def test_a_tensor_of_a_case_moves_its_logits_far_beyond_the_tolerance(name, tensor, directories, expected):
    assert _distance(transformers_logits(directories[name], SEQUENCES, tensor), expected(name)) > 50 * ATOL


def _distance(logits, others):
    return max(np.abs(one.numpy() - other).max() for one, other in zip(logits, others, strict=True))


@pytest.mark.parametrize(("name", "layout"), PROVEN)
def test_loading_and_exporting_gives_the_checkpoint_back_bit_by_bit(name, layout, proofs):
    assert proofs(layout)[name].wrong_names == []


@pytest.mark.parametrize(("name", "layout"), PROVEN)
def test_the_pieces_that_ranks_send_in_a_push_are_the_checkpoint_s_and_make_up_every_tensor(name, layout, proofs):
    assert proofs(layout)[name].wrong_pieces == []


@pytest.mark.parametrize(("name", "layout"), [case for case in PROVEN if case[1] != "one"])
def test_an_update_equals_that_of_one_process_with_the_loss_of_multi_token_prediction(name, layout, proofs):
    found, wanted = (proofs(under)[name].stats for under in (layout, "one"))
    assert (found.loss, found.grad_norm, found.entropy) == pytest.approx(
        (wanted.loss, wanted.grad_norm, wanted.entropy), rel=1e-4, abs=1e-6
    )
    assert (found.mtp_loss is not None) == (name in MTP)
    assert found.mtp_loss is None or found.mtp_loss == pytest.approx(wanted.mtp_loss, rel=1e-5)


@pytest.mark.parametrize(
    "name", [name for name in BUILT if name not in MTP and FAMILIES[CASES[name]["model_type"]].served.computed_as is None]
)
def test_an_update_has_the_loss_and_the_gradient_of_transformers(name, directories, proofs):
    """The norm over all gradients; families whose layers of multi-token prediction add a loss have other tests."""
    oracle = HFTrainGroup(settings(directories[name], Layout()), checkpoint_dir=directories[name])

    async def update():
        await oracle.start()
        return await oracle.update(BATCH, loss_of(algorithm("grpo")), lr=1e-3)

    expected = asyncio.run(update())
    found = proofs("one")[name].stats
    assert (found.loss, found.entropy) == pytest.approx((expected.loss, expected.entropy), rel=1e-4, abs=1e-6)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)


def test_sinks_of_attention_leave_the_weights_of_later_chunks_right_in_float64(directories):
    """Transformer Engine makes sinks in float32, and gloo gathers the buffers of such a chunk as if all had one dtype."""
    found, wanted = (
        run_ranks(train, layout.ranks, settings(directories["gpt_oss"], layout, dtype="float64"), BATCH, 1)
        for layout in (Layout(ranks=4, pp=2, vpp=2), Layout())
    )
    for name, weight in wanted.weights.items():
        np.testing.assert_allclose(found.weights[name], weight, atol=1e-6, rtol=0, err_msg=name)


def test_layers_of_multi_token_prediction_that_are_not_trained_leave_as_they_came(directories):
    found = run_ranks(prove, 1, [settings(directories[name], Layout()) for name in MTP if name in BUILT], BATCH)
    assert [(proof.wrong_names, proof.stats.mtp_loss) for proof in found] == [([], None)] * len(found)


@pytest.mark.parametrize("name", BUILT)
def test_the_model_that_megatron_builds_is_what_a_conversion_expects(name, directories, proofs):
    config = json.loads((directories[name] / "config.json").read_text())
    parts = expected_tensors(FAMILIES[config["model_type"]], config).shapes
    count = Counter(map(stored_name, parts))
    expected = {stored_name(key): (count[stored_name(key)], *shape) if stored_name(key) != key else shape for key, shape in parts.items()}
    built = {spec.name: spec.shape for spec in proofs("one")[name].pushed}
    assert built == {key: expected[key] for key in _served(name, expected)}


# -- the hf engine -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def servers(directories):
    """From a case to the hf engine's forward passes over it, its weights pushed tensor by tensor."""

    @functools.cache
    def of(name):
        torch.set_num_threads(1)
        model = load_model(directories[name], dtype=torch.float32, load="dummy", deterministic=True, max_context=32)
        weights, views = load_file(directories[name] / "model.safetensors"), checkpoint_views(model)
        assert {key: view.shape for key, view in views.items()} == {key: weights[key].shape for key in _served(name, weights)}
        for key, view in views.items():
            view.copy_(weights[key])
        return Forward(model, num_slots=len(SEQUENCES), max_context=32, prefill_chunk=32, deterministic=True)

    return of


def _served(name, weights):
    """A server has no layers of multi-token prediction."""
    return {key for key in weights if name not in MTP or not key.startswith(("model.layers.4.", "model.layers.5."))}


def _prefill(forward, slots):
    forward.cache.clear(torch.tensor(list(slots)))  # as the scheduler does
    chunks = [np.array(SEQUENCES[slot]) for slot in slots]
    passed = forward.prefill(np.array(slots), chunks, np.zeros(len(slots), dtype=np.int64), with_routes=forward.routes is not None)
    return passed.logits.numpy()


@pytest.mark.parametrize("name", CASES)
def test_the_hf_engine_serves_what_transformers_computes_with_the_same_bits_in_any_company(name, servers, expected):
    together = _prefill(servers(name), range(len(SEQUENCES)))
    np.testing.assert_allclose(together, [logits[-1] for logits in expected(name)], atol=ATOL, rtol=0)
    np.testing.assert_array_equal(together[2:3], _prefill(servers(name), [2]))


@pytest.mark.parametrize("name", BUILT)
def test_a_push_brings_exactly_what_the_hf_engine_expects(name, directories, proofs):
    expected = checkpoint_specs(directories[name], torch.float32)
    assert {spec.name: spec for spec in proofs("one")[name].pushed} == expected
