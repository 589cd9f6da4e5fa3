import math

import numpy as np
import pytest

from moerl.evaluation.estimates import Outcome, result_of
from moerl.observe.metrics import METRICS, checkpoint_metrics, metric, move_metrics, push_metrics, step_metrics, summarize
from moerl.types.completion import DraftCounts
from moerl.types.push import PushStats
from moerl.types.routes import RouteShape
from moerl.types.stats import MemoryStats, MismatchStats, Move, RoutingStats, SavedCheckpoint


@pytest.fixture
def measure(make_stats):
    def measure(*groups, version=1, **changes):
        settings = dict(phase_seconds={"update": 2.0}, step_seconds=4.0, full_reward=1.0)
        stats = changes.pop("stats", make_stats())
        return step_metrics(version, groups, stats, **{**settings, **changes})

    return measure


def test_staleness_counts_from_the_version_trained_to_the_oldest_span(measure, make_group, make_sample):
    """Version 8 was trained from 7: a sample begun at 4 is 3 versions old however few tokens are, a sample of 7 is fresh."""
    values = measure(make_group(make_sample(versions=[(4, 1), (6, 9)]), make_sample(versions=[(7, 5)])), version=8)
    assert values["staleness/mean"] == 1.5
    assert values["staleness/max"] == 3.0


def test_rewards_lengths_and_parts_are_over_samples_not_groups(measure, make_group, make_sample):
    groups = (
        make_group(make_sample(1.0, math=1.0, format=0.0, versions=[(0, 2)])),
        make_group(make_sample(0.0, math=0.0, versions=[(0, 4)]), make_sample(0.5, math=0.5, versions=[(0, 6)], finish="length")),
    )
    values = measure(*groups)
    assert values["reward/mean"] == 0.5
    assert (values["reward/min"], values["reward/max"]) == (0.0, 1.0)
    assert values["reward/std"] == pytest.approx(math.sqrt(1 / 6))
    assert values["reward/part/math"] == 0.5
    assert values["reward/part/format"] == 0.0, "only over the samples that have the part"
    assert (values["length/mean"], values["length/max"]) == (4.0, 6.0)
    assert values["length/truncated"] == pytest.approx(1 / 3)
    assert values["tokens/response"] == 12.0
    assert values["tokens/per_second"] == 3.0


def test_groups_are_solved_only_with_the_full_reward(measure, make_group, make_sample):
    solved, failed, mixed = (make_group(*map(make_sample, rewards)) for rewards in [(0.9 + 0.1, 1.0), (0.0, 0.0), (0.0, 1.0)])
    values = measure(solved, failed, failed, mixed)
    assert values["groups/solved"] == 0.25
    assert values["groups/uniform"] == 0.75
    assert measure(make_group(make_sample(0.1 + 0.2), make_sample(0.3)))["groups/uniform"] == 1.0, "but for rounding, as in advantages"


def test_the_gradient_norm_is_told_as_the_largest_of_a_step_which_ranks_report():
    """tests/train/test_hf_parity.py holds the number against another trainer's, with several updates too."""
    assert "largest" in metric("train/grad_norm").meaning


def test_samples_that_could_not_be_scored_are_counted_and_leave_the_rest_alone(measure, make_group, make_sample):
    values = measure(make_group(make_sample(1.0), errors=("timeout", "at temperature 0: timeout")), make_group(errors=("timeout",)))
    assert values["reward/errors"] == 3.0 and "temperature 0" in metric("reward/errors").meaning
    assert values["reward/mean"] == 1.0
    assert values["tokens/response"] == 4.0, "of the scored one, as its meaning says"
    assert "could not be scored" in metric("tokens/response").meaning


def test_routes_are_told_to_be_twice_as_wide_from_the_number_of_experts_on_at_which_they_are():
    def width(num_experts):
        return RouteShape(num_layers=1, top_k=8, num_experts=num_experts).dtype.itemsize

    assert metric("routing/payload_bytes").meaning.endswith("* 2 over 256 experts") and (width(256), width(257)) == (1, 2)


def test_a_step_without_samples_has_no_reward_instead_of_a_zero(measure, make_group):
    values = measure(make_group(errors=("timeout",)))
    assert not {"reward/mean", "length/mean", "staleness/mean", "groups/solved"} & values.keys()


def test_a_completion_without_tokens_has_no_staleness(measure, make_group, make_sample):
    values = measure(make_group(make_sample(versions=[], finish="abort"), make_sample(versions=[(0, 3)])), version=3)
    assert values["staleness/max"] == 2.0


def test_the_acceptance_length_is_the_mean_over_the_passes_of_all_samples(measure, make_group, make_sample):
    values = measure(make_group(make_sample(drafts=DraftCounts(4, 6)), make_sample(drafts=DraftCounts(2, 0)), make_sample()))
    assert values["fleet/acceptance_length"] == 2.0
    assert "fleet/acceptance_length" not in measure(make_group(make_sample()))


def test_phases_and_other_add_up_to_the_step(measure, make_group, make_sample):
    values = measure(make_group(make_sample()), phase_seconds={"rollout": 1.5, "update": 2.0}, step_seconds=4.0)
    assert values["time/rollout"] + values["time/update"] + values["time/other"] == values["time/step"] == 4.0


COMPANIONS = (
    *(f"critic/{name}" for name in ("loss", "explained_variance", "value", "return", "clipped")),
    *(f"outcome_model/{name}" for name in ("loss", "accuracy", "right")),
    "companion/critic/grad_norm",
)


def test_the_vocabulary_and_the_metrics_are_the_same_names(measure, make_group, make_sample, make_stats):
    memory = MemoryStats(
        device_bytes={"training": {"parameters": 8, "reference": 0}},
        host_bytes={"optimizer": 24},
        transition_seconds={"asleep_to_scoring": 0.5},
        peaks={"process": 32},
    )
    routing = RoutingStats(layers=(0,), load_max=(1.0,), load_min=(0.0,), load_mean=(0.5,), dead_experts=(0,), replayed=1.0, overlap=(1.0,))
    sample = make_sample(1.0, math=1.0, drafts=DraftCounts(1, 1), routes=np.zeros((5, 1, 2), dtype=np.uint8))
    mismatch = MismatchStats(k1=0.0, chi2=0.0, effective=1.0, trainer_perplexity=2.0, server_perplexity=2.0, correlation=1.0)
    stats = make_stats(
        kl_reference=0.1, mtp_loss=2.0, memory=memory, routing=routing, mismatch=mismatch, kl_coefficient=0.1, objective={"selected": 0.1},
        whole_minibatch_seconds=0.5, kl_teacher=0.5, companions=dict.fromkeys(COMPANIONS, 0.5),
    )  # fmt: skip
    pushed = PushStats(version=0, num_tensors=3, num_bytes=64, num_buckets=1, num_senders=1, seconds=0.5, num_network=48)
    values = measure(make_group(sample), stats=stats) | push_metrics(pushed)
    values |= move_metrics({"servers_sleep": Move(seconds=0.25, num_bytes=8)})
    values |= {
        "groups/dropped": 3.0,
        "groups/parked": 3.0,
        "fleet/restarts": 0.0,
        "fleet/retired": 0.0,
        "fleet/resumed": 0.0,
        "fleet/preempted": 0.0,
        "fleet/bound": 8.0,
    }  # of the buffer and of the publisher
    assert (values["residency/seconds/servers_sleep"], values["residency/bytes/servers_sleep"]) == (0.25, 8.0)
    assert [values[f"push/{name}"] for name in ("seconds", "bytes", "network_bytes", "written_bytes")] == [0.5, 64.0, 48.0, 0.0]
    assert {name: values[name] for name in values if name.startswith("memory/")} == {
        "memory/device/training/parameters": 8.0,
        "memory/host/optimizer": 24.0,
        "memory/peak/process": 32.0,
        "memory/seconds/asleep_to_scoring": 0.5,
    }
    values |= checkpoint_metrics(SavedCheckpoint(version=1, num_bytes=1, seconds=1.0, blocked_seconds=1.0))
    outcome = Outcome(reward=1.0, passed=True, length=1, truncated=False, error=None, parts={})
    values |= result_of("math", [[outcome], [outcome]], pass_at=(1,)).metrics()
    assert {metric(name).name for name in values} == {entry.name for entry in METRICS}


def test_a_reward_term_may_have_any_name(measure, make_group, make_sample):
    values = measure(make_group(make_sample(1.0, **{"math/last": 1.0})))
    assert metric("reward/part/math/last").name == "reward/part/*"
    assert summarize([{"step": 1, **values}])["reward/part/math/last"] == 1.0


def test_an_undocumented_name_is_refused():
    with pytest.raises(KeyError):
        metric("reward/median")


def test_the_reference_is_absent_without_one(measure, make_group, make_sample):
    assert "train/kl_reference" not in measure(make_group(make_sample()))


def test_a_summary_reduces_each_metric_in_its_own_way():
    rows = [
        {"step": 1, "reward/mean": 0.0, "reward/min": -1.0, "mismatch/max": 5.0, "groups/dropped": 2.0, "train/lr": 1.0},
        {"step": 2, "reward/mean": 1.0, "reward/min": 0.0, "mismatch/max": 1.0, "groups/dropped": 3.0, "train/lr": 0.5},
        {"step": 3, "mismatch/max": 2.0, "reward/of_another_version": 1.0},
    ]
    assert summarize(rows) == {"reward/mean": 0.5, "reward/min": -1.0, "mismatch/max": 5.0, "groups/dropped": 5.0, "train/lr": 0.5}


def test_loads_are_reported_by_layer_and_over_all_layers(measure, make_stats, make_group, make_sample):
    routing = RoutingStats(
        layers=(1, 3), load_max=(0.5, 2.0), load_min=(-0.25, -1.0), load_mean=(0.25, 0.75), dead_experts=(0, 3), replayed=0.75,
        overlap=(1.0, 0.5),
    )  # fmt: skip
    values = measure(make_group(make_sample()), stats=make_stats(routing=routing))
    found = {name.removeprefix("routing/"): value for name, value in values.items() if name.startswith("routing/")}
    assert found == {
        "load_max": 2.0, "load_min": -1.0, "load_mean": 0.5, "dead_experts": 3.0, "overlap": 0.75, "replayed": 0.75,
        "layer/1/load_max": 0.5, "layer/1/load_min": -0.25, "layer/1/load_mean": 0.25, "layer/1/dead_experts": 0.0, "layer/1/overlap": 1.0,
        "layer/3/load_max": 2.0, "layer/3/load_min": -1.0, "layer/3/load_mean": 0.75, "layer/3/dead_experts": 3.0, "layer/3/overlap": 0.5,
    }  # fmt: skip


def test_a_dense_model_and_a_run_without_replay_report_no_routes(measure, make_stats, make_group, make_sample):
    assert not any(name.startswith("routing/") for name in measure(make_group(make_sample())))
    loads = RoutingStats(layers=(0,), load_max=(0.0,), load_min=(0.0,), load_mean=(0.0,), dead_experts=(0,))
    values = measure(make_group(make_sample()), stats=make_stats(routing=loads))
    assert not {"routing/replayed", "routing/overlap", "routing/layer/0/overlap", "routing/payload_bytes"} & values.keys()


def test_the_payload_is_the_bytes_of_all_routes(measure, make_group, make_sample):
    routed = [make_sample(routes=np.zeros((length, 3, 2), dtype=dtype)) for length, dtype in ((5, np.uint8), (7, np.uint16))]
    values = measure(make_group(*routed, make_sample()))
    assert values["routing/payload_bytes"] == 5 * 6 + 7 * 6 * 2
    # Three samples of 2 prompt tokens (ids alone), 4 response tokens (ids and log-probs) and 2 characters.
    assert values["data/payload_bytes"] == values["routing/payload_bytes"] + 3 * (2 * 4 + 4 * 8 + 2)
