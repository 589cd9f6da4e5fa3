"""Every algorithm and correction trains alike under every layout, split and order: loss, gradient (by the weights that a step along it
leads to), metrics."""

from dataclasses import asdict, replace

import numpy as np
import pytest
from algorithm_jobs import losses, ragged_batch, train_by_each
from engine_cases import LAYOUTS, settings
from engine_ranks import run_ranks

from moerl.config.schema.layout import Layout

NUMBERS = (
    "loss", "entropy", "kl_old", "kl_old_k1", "kl_reference", "clip_fraction", "correction_weight", "correction_bounded",
    "correction_dropped", "mismatch_mean", "mismatch_max", "mismatch_kl", "num_tokens", "kl_teacher",
)  # fmt: skip
ORDER = list(range(13))


def exact(directory, layout, *, dtype="float64", **options):
    """Settings in float64, without the clip of gradients, whose norm Megatron computes in float32; see algorithm_jobs.LR for eps."""
    chosen = settings(directory, layout, dtype=dtype, **options)
    return replace(chosen, train=replace(chosen.train, optimizer=replace(chosen.train.optimizer, clip_grad=None, eps=1.0)))


@pytest.fixture(scope="module")
def one_process(checkpoints):
    return run_ranks(train_by_each, 1, exact(checkpoints["qwen3_moe"], Layout()), ragged_batch(), ORDER)


def assert_alike(found, expected, *, rel=1e-10, absolute=1e-11):
    wrong = []
    for name, (stats, after_T) in found.items():
        wanted, wanted_T = expected[name]
        pairs = {number: (getattr(stats, number), getattr(wanted, number)) for number in NUMBERS}
        pairs = {number: pair for number, pair in pairs.items() if pair != (None, None)}
        pairs |= {f"objective {key}": (value, wanted.objective[key]) for key, value in stats.objective.items()}
        pairs |= {f"mismatch {key}": (value, asdict(wanted.mismatch)[key]) for key, value in asdict(stats.mismatch).items()}
        wrong += [(name, number, *pair) for number, pair in pairs.items() if pair[0] != pytest.approx(pair[1], rel=rel, abs=absolute)]
        if stats.grad_norm != pytest.approx(wanted.grad_norm, rel=max(rel, 1e-6)):
            wrong.append((name, "gradient", stats.grad_norm, wanted.grad_norm))
        if not np.allclose(after_T, wanted_T, rtol=0, atol=100 * absolute):
            wrong.append((name, "weights", float(np.abs(after_T - wanted_T).max())))
    assert wrong == []


ALONE = [pytest.param(name, marks=pytest.mark.matrix) for name in ("tp2", "ep2", "tp2-cp2")]


@pytest.mark.parametrize("layout", ["dp2", "cp2", "tp2-ep2", "pp2", *ALONE])
def test_every_algorithm_trains_alike_under_a_layout(layout, checkpoints, one_process):
    chosen = exact(checkpoints["qwen3_moe"], LAYOUTS[layout])
    assert_alike(run_ranks(train_by_each, LAYOUTS[layout].ranks, chosen, ragged_batch(), ORDER), one_process)


def test_every_algorithm_trains_alike_where_a_rank_has_no_sequence(checkpoints):
    """As where many samples are left out, or a step has more mini-batches than its ranks have sequences."""
    batch = ragged_batch().select([0])
    one, two = (
        run_ranks(train_by_each, each.ranks, exact(checkpoints["qwen3_moe"], each), batch, [0]) for each in (Layout(), LAYOUTS["dp2"])
    )
    assert_alike(two, one)


@pytest.mark.matrix
def test_every_algorithm_trains_alike_in_float32(checkpoints):
    one, two = (
        run_ranks(train_by_each, layout.ranks, exact(checkpoints["qwen3_moe"], layout, dtype="float32"), ragged_batch(), ORDER)
        for layout in (Layout(), LAYOUTS["tp2-ep2"])
    )
    assert_alike(two, one, rel=1e-5, absolute=1e-6)


@pytest.mark.parametrize("micro_batch_tokens", [32, 256])
def test_every_algorithm_trains_alike_whatever_the_micro_batches_are_and_what_is_outside_the_mask(
    micro_batch_tokens, checkpoints, one_process
):
    chosen = exact(checkpoints["qwen3_moe"], Layout(), micro_batch_tokens=micro_batch_tokens)
    assert_alike(run_ranks(train_by_each, 1, chosen, ragged_batch(outside=float("nan")), ORDER[::-1]), one_process)


def test_bounds_are_reached_and_differ(one_process):
    """Else the tests above would hold for losses that all do the same."""
    assert len({round(stats.loss, 12) for stats, _ in one_process.values()}) == len(losses())
    clipped = {name for name, (stats, _) in one_process.items() if stats.clip_fraction > 0}
    assert clipped >= {"ppo_clip", "gspo", "cispo", "gmpo", "clip_cov", "m2po", "dppo_tv", "dppo_kl", "ipo"}
    corrected = [stats for name, (stats, _) in one_process.items() if "." in name]
    assert all(0 < stats.correction_bounded < 1 for stats in corrected)
    assert sum(stats.correction_dropped > 0 for stats in corrected) == 12
