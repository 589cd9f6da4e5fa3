"""Muon: one process against a plain statement of it, every layout against one process, checkpoints, and who makes what orthogonal."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checkpoint_jobs import load_and_continue, save_and_continue
from engine_cases import LAYOUTS, random_batch, settings
from engine_jobs import train
from engine_ranks import run_ranks
from family_cases import write_case
from hypothesis import given
from hypothesis import strategies as st
from muon_jobs import plain_and_real_steps
from torch.distributed.checkpoint import FileSystemReader

from moerl.config.schema.layout import Layout
from moerl.config.schema.train_config import MuonConfig
from moerl.train.optimizer.matrices import owners, rounds
from moerl.train.optimizer.newton_schulz import COEFFICIENTS, ITERATIONS, orthogonal, scaled_orthogonal


def case(checkpoints, layout, model="qwen3_moe", *, dtype="float64", **changes):
    chosen = settings(checkpoints[model], layout, dtype=dtype)
    optimizer = replace(chosen.train.optimizer, muon=MuonConfig())
    return replace(chosen, train=replace(chosen.train, optimizer=optimizer, **changes))


# -- the update ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 8, 5), (2, 5, 8), (1, 6, 6)])
def test_singular_vectors_stay_and_values_follow_the_quintic(shape):
    matrices = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    values = values / values.norm(dim=1, keepdim=True)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        values = a * values + b * values**3 + c * values**5
    torch.testing.assert_close(orthogonal(matrices, torch.float64), left * values[:, None] @ right, atol=1e-12, rtol=0)


def test_a_matrix_equals_that_of_torchs_muon():
    from torch.optim._muon import _zeropower_via_newtonschulz

    matrix = torch.randn(24, 40, generator=torch.Generator().manual_seed(0))
    expected = _zeropower_via_newtonschulz(matrix, COEFFICIENTS, ITERATIONS, 1e-7).float()
    torch.testing.assert_close(orthogonal(matrix[None], torch.bfloat16)[0], expected, atol=0.02, rtol=0)  # of .5: bfloat16


def test_rows_of_a_query_group_are_matrices_of_their_own():
    """Two groups of 4 rows of queries, 2 of keys, 2 of values: what belongs together lies apart."""
    step = torch.randn(1, 16, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scaled = scaled_orthogonal(step, (4, 2, 2), torch.float64)
    for rows, side in (([0, 1, 2, 3, 8, 9, 10, 11], 12), ([4, 5, 12, 13], 12), ([6, 7, 14, 15], 12)):
        torch.testing.assert_close(scaled[:, rows], orthogonal(step[:, rows], torch.float64) * side**0.5)


@pytest.mark.parametrize("model", ["qwen3_moe", "untied-qwen3"])
def test_one_process_equals_a_plain_statement(model, checkpoints):
    """Three updates of every weight: SVD, momentum and Adam written out."""
    real, plain = run_ranks(plain_and_real_steps, 1, case(checkpoints, Layout(), model), random_batch())
    assert real.keys() == plain.keys()
    for name, weight in real.items():
        np.testing.assert_allclose(weight, plain[name], atol=1e-10, rtol=0, err_msg=name)


# -- layouts ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_process(checkpoints):
    return run_ranks(train, 1, case(checkpoints, Layout()), random_batch())


EIGHT_RANKS = [pytest.param(name, marks=pytest.mark.matrix) for name in ("tp2-ep2-etp2-dp2", "tp2-pp2-vpp2-cp2-ep4")]


@pytest.mark.parametrize("name", ["dp2", "tp2", "tp2-etp2", "ep2", "pp2", "cp2", *EIGHT_RANKS])
def test_a_layout_equals_one_process(name, checkpoints, one_process):
    result = run_ranks(train, LAYOUTS[name].ranks, case(checkpoints, LAYOUTS[name]), random_batch())
    for step, wanted in zip(result.steps, one_process.steps, strict=True):
        assert (step.loss, step.grad_norm) == pytest.approx((wanted.loss, wanted.grad_norm), rel=1e-6)  # a norm is in float32
    for name, weight in result.weights.items():
        np.testing.assert_allclose(weight, one_process.weights[name], atol=1e-7, rtol=0, err_msg=name)


@pytest.mark.parametrize("shares", [{"overlap_grad_reduce": True, "overlap_bucket_size": 4000}, {"offload": "all"}])
def test_buckets_and_offload_change_no_weight(shares, checkpoints, one_process):
    result = run_ranks(train, 2, case(checkpoints, LAYOUTS["dp2"], **shares), random_batch())
    for name, weight in result.weights.items():
        np.testing.assert_allclose(weight, one_process.weights[name], atol=1e-7, rtol=0, err_msg=name)


def test_both_copies_of_an_embedding_move_alike(tmp_path):
    """Multi-token prediction has one on the last stage, which Megatron 0.16.1 does not mark as an embedding."""
    directory = write_case("deepseek_v3", tmp_path)
    one, two = (
        run_ranks(train, layout.ranks, case({"deepseek_v3": directory}, layout, "deepseek_v3", mtp_loss=0.1), random_batch(), 2, 1)
        for layout in (Layout(), LAYOUTS["pp2"])
    )
    for name, weight in two.weights.items():
        np.testing.assert_allclose(weight, one.weights[name], atol=1e-7, rtol=0, err_msg=name)


# -- checkpoints -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after", "dtype"), [("dp2", "tp2", "float64"), ("ep2", "ep2", "bfloat16")])
def test_a_checkpoint_continues(before, after, dtype, checkpoints, tmp_path):
    chosen = case(checkpoints, LAYOUTS[before], dtype=dtype)
    straight, again, _ = run_ranks(save_and_continue, 2, chosen, random_batch(), tmp_path)
    assert again.steps == straight.steps  # bit by bit
    elsewhere = run_ranks(load_and_continue, 2, case(checkpoints, LAYOUTS[after], dtype=dtype), random_batch(), tmp_path)
    for name, weight in elsewhere.weights.items():
        np.testing.assert_allclose(weight, straight.weights[name], atol=1e-7 if before != after else 0, rtol=0, err_msg=name)
    stored = FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    moments = {name.partition("exp_avg_sq.")[2] for name in stored if "exp_avg_sq" in name}
    assert {"embedding.word_embeddings.weight", "decoder.final_layernorm.weight"} < moments
    assert not [name for name in moments if name.endswith(("linear_fc1.weight", "linear_qkv.weight", "router.weight"))]


# -- who makes what orthogonal -----------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30)), max_size=40), st.integers(10, 60))
def test_no_rank_waits_for_a_round_that_it_could_have_filled(matrices, most):
    """Each of an owner's rounds but its last is too full for the next of its matrices."""
    given_matrices = [SimpleNamespace(owner=owner, whole=whole) for owner, whole in matrices]
    found = rounds(given_matrices, most)
    assert sorted(id(matrix) for part in found for matrix in part) == sorted(map(id, given_matrices))
    for owner in range(4):
        parts = [[matrix.whole for matrix in part if matrix.owner == owner] for part in found]
        kept = [part for part in parts if part]
        assert parts[: len(kept)] == kept  # none between them is empty
        assert [whole for part in kept for whole in part] == [matrix.whole for matrix in given_matrices if matrix.owner == owner]
        assert all(sum(part) <= most or len(part) == 1 for part in kept)
        assert all(sum(part) + following[0] > most for part, following in pairwise(kept))


@given(st.lists(st.tuples(st.integers(2, 50), st.integers(2, 50)), min_size=1, max_size=30), st.integers(1, 8))
def test_an_owner_holds_some_of_its_matrix(shapes, ranks):
    ends = np.cumsum([rows * columns for rows, columns in shapes])
    share = -(-int(ends[-1]) // ranks)
    held = [
        [max(0, min(end, (rank + 1) * share) - max(end - rows * columns, rank * share)) for rank in range(ranks)]
        for end, (rows, columns) in zip(ends.tolist(), shapes, strict=True)
    ]
    assert all(held[number][owner] > 0 for number, owner in enumerate(owners(shapes, held)))


def test_matrices_that_several_ranks_hold_are_shared_out():
    assert Counter(owners([(8, 8)] * 12, [[16, 16, 16, 16]] * 12)) == {0: 3, 1: 3, 2: 3, 3: 3}
