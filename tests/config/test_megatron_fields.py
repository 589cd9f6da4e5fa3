"""Names under train.megatron against Megatron's real dataclass."""

import dataclasses
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pytest

import megatron_patches
from moerl.config.rules.megatron_rules import (
    ALLOWED,
    OWNED,
    REFUSED,
    WITHOUT_REPLAY,
    dispatcher_problems,
    field_problems,
    megatron_fields,
    replay_problems_of,
)
from moerl.config.schema.layout import Layout
from moerl.config.schema.train_config import OptimizerConfig, TrainConfig

PINS = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
DOCUMENT = (Path(__file__).parents[2] / "docs/add-a-family.md").read_text()


NEWER = {
    "dsa_indexer_topk_freq", "dsa_indexer_skip_topk_offset", "dsa_indexer_rope_interleaved", "dsa_indexer_rotate_activation",
    "dsa_indexer_scoring_relu", "dsa_indexer_k_norm_epsilon", "dsa_kernel_backend",
}  # fmt: skip
"""Fields that moerl sets or allows with megatron-core 0.19, and that the pinned one has not."""


def test_the_names_read_from_source_are_the_fields_of_the_dataclass():
    megatron_patches.activate()  # before the import, for tests of this process that need them
    from megatron.core.transformer.transformer_config import TransformerConfig

    assert set(megatron_fields()) == {field.name for field in dataclasses.fields(TransformerConfig)}


def test_every_owned_name_is_a_field_of_megatron():
    assert set(OWNED) <= set(megatron_fields()) | NEWER


def test_an_owned_name_is_refused_with_what_to_do_instead():
    (problem,) = field_problems({"context_parallel_size": 2})
    assert problem.fix == "set train.layout.cp instead"


def test_without_megatron_any_name_is_refused_and_none_is_fine(monkeypatch):
    monkeypatch.setattr("moerl.config.rules.megatron_rules.megatron_fields", dict)
    assert not list(field_problems({}))
    (problem,) = field_problems({"moe_z_loss_coeff": 0.1})
    assert problem.rule == "needs megatron-core"


def written():
    """Fields that a file can set."""
    return {name for name, kind in megatron_fields().items() if not any(word in kind for word in ("Callable", "dtype", "ContextManager"))}


def test_every_field_has_one_verdict():
    assert set(Counter([*OWNED, *ALLOWED, *REFUSED]).values()) == {1}
    assert set(WITHOUT_REPLAY) <= set(ALLOWED)


@pytest.mark.skipif(f"megatron-core=={version('megatron-core')}" not in PINS, reason="the lists are of the pinned version")
def test_every_field_of_the_pinned_version_is_set_by_moerl_allowed_or_refused_with_a_reason():
    assert written() <= {*OWNED, *ALLOWED, *REFUSED} <= set(megatron_fields()) | NEWER


def test_a_field_that_only_another_version_has_is_refused(monkeypatch):
    monkeypatch.setattr("moerl.config.rules.megatron_rules.megatron_fields", lambda: {"of_another_version": "bool"})
    (problem,) = field_problems({"of_another_version": True})
    assert (problem.rule, problem.reason) == ("cannot be set", "the Megatron that moerl is tested with has no such field")


@pytest.mark.parametrize("backend", ["tilelang", "cudnn"])
def test_the_kernels_of_sparse_attention_that_the_documents_name_can_be_asked_for(backend, monkeypatch):
    monkeypatch.setattr("moerl.config.rules.megatron_rules.megatron_fields", lambda: {"dsa_kernel_backend": "Literal"})
    assert f"dsa_kernel_backend={backend}" in DOCUMENT or f"`{backend}`" in DOCUMENT
    assert list(field_problems({"dsa_kernel_backend": backend})) == []
    assert len(list(field_problems({"dsa_kernel_backend": "flashmla"}))) == 1


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"moe_expert_capacity_factor": 1.0}, "beyond an expert's capacity"),
        ({"moe_input_jitter_eps": 0.1}, "log-probs of two passes"),
        ({"moe_router_force_load_balancing": True}, "random numbers"),
        ({"softmax_scale": 0.1}, "config.json says what the model computes"),
        ({"moe_router_dtype": None}, "must be fp32 or fp64"),
        ({"moe_token_dispatcher_type": "allgather"}, "must be alltoall or flex"),
        ({"moe_token_dispatcher_type": "alltoal"}, "must be alltoall or flex"),
        ({"moe_z_loss_coeff": float("nan")}, "must be a number >= 0"),
        ({"moe_permute_fusion": "yes"}, "must be true or false"),
        ({"moe_grouped_gemm": False}, "by the names that grouped products give"),
        ({"cp_comm_type": ["p2p"]}, "must be one of p2p"),
        ({"fp32_residual_connection": True}, "the dtype of its weights alone"),
    ],
)
def test_what_would_change_the_model_is_refused_with_the_reason(setting, said):
    (problem,) = field_problems(setting)
    assert said in f"{problem.rule}: {problem.reason}"


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"cuda_graph_impl": "transformer_engine"}, "Megatron's own training loop captures"),
        ({"cuda_graph_impl": "local"}, "which train.offload moves"),
        ({"use_te_rng_tracker": True}, "a graph is of one length"),
        ({"tp_comm_overlap": True}, "made by Megatron's own training script"),
        ({"overlap_moe_expert_parallel_comm": True}, "a plan of layers"),
        ({"use_ring_exchange_p2p": True}, "PyTorch has no ring_exchange"),
        ({"pipeline_model_parallel_comm_backend": "ucc"}, "where groups are made"),
        ({"batch_invariant_mode": True}, "FlashAttention 3"),
    ],
)
def test_what_works_in_megatron_s_own_training_script_alone_is_refused(setting, said):
    (problem,) = field_problems(setting)
    assert problem.rule == "cannot be set"
    assert said in problem.reason


FLEX = {"moe_token_dispatcher_type": "flex"}


def flex(*, dtype="bfloat16", ep=16, etp=1, **more):
    layout = Layout(ranks=ep * etp, ep=ep, etp=etp, tp=etp)
    train = TrainConfig(optimizer=OptimizerConfig(lr=1e-6), layout=layout, dtype=dtype, megatron=FLEX | more)
    return [problem.path for problem in dispatcher_problems(train)]


@pytest.mark.parametrize(
    ("ep", "is_sent"),
    [
        (2, True),
        (8, True),
        (16, True),
        (48, True),
        (160, True),
        (3, False),
        (12, False),
        (40, False),
        (80, False),
        (168, False),
        (1, False),
    ],
)
def test_deepep_is_for_the_numbers_of_ranks_that_it_has_kernels_for(ep, is_sent):
    assert flex(ep=ep) == ([] if is_sent else ["train.megatron.moe_token_dispatcher_type"])


def test_deepep_is_refused_where_it_sends_no_such_tokens_or_would_lose_a_route():
    assert flex(ep=8, etp=2) == []
    assert flex(dtype="float32") == ["train.megatron.moe_token_dispatcher_type"]
    assert flex(moe_shared_expert_overlap=True) == ["train.megatron.moe_shared_expert_overlap"]
    assert len(list(replay_problems_of(FLEX, "rollout"))) == 1
    assert list(replay_problems_of({"moe_token_dispatcher_type": "alltoall"}, "rollout")) == []
