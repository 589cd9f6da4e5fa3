"""The plan of a run's pushes is made once; servers that end and come back change nothing in it but who is there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_deliveries import an_outline, shares

from moerl.weights.plan import run_plan
from moerl.weights.plan.buckets import in_order
from moerl.weights.plan.run_plan import KeptPlan, RankPlaces, plan_deliveries

NODES = {"a": ["x"], "b": ["x"], "c": ["y"]}
OUTLINE = an_outline()
NEEDS = {name: shares(OUTLINE, 2, 4) for name in NODES}
PLACES = RankPlaces(nodes=["x", "y"] * (OUTLINE.layout.ranks // 2), gpus=[0] * OUTLINE.layout.ranks, server_gpus=dict.fromkeys(NODES, ()))
KINDS = {"ipc": (None, None), "nccl": (NODES, None), "relay": (NODES, PLACES)}


@pytest.fixture
def made(monkeypatch):
    """Servers of every plan that is made."""
    found = []
    monkeypatch.setattr(run_plan, "plan_deliveries", lambda *inputs: found.append(list(inputs[1])) or plan_deliveries(*inputs))
    return found


def new_plan():
    plan = KeptPlan()
    plan.outline = OUTLINE
    return plan


def of(plan, names, kind):
    return plan.of({name: NEEDS[name] for name in names}, *KINDS[kind])


def brought(found, num_readers):
    """By reader all entries, each once."""
    buckets = in_order(found.jobs)
    arrived = [[entry for bucket in buckets if reader in bucket.readers for entry in bucket.entries] for reader in range(num_readers)]
    return [sorted((entry.name, entry.start, entry.shape) for entry in entries) for entries in arrived]


@given(names=st.sets(st.sampled_from("abc"), min_size=1), kind=st.sampled_from(sorted(KINDS)))
def test_the_plan_for_servers_that_are_left_brings_them_what_the_plan_for_all_does(names, kind):
    plan, names = new_plan(), sorted(names)
    everything = brought(of(plan, "abc", kind), 12)
    found = of(plan, names, kind)
    first = {name: 4 * number for number, name in enumerate("abc")}
    assert brought(found, 4 * len(names)) == [everything[first[name] + process] for name in names for process in range(4)]
    for sender, job in found.jobs.items():
        assert [(bucket.sender, bucket.index) for bucket in job] == [(sender, index) for index in range(len(job))]
        assert [bucket.round for bucket in job] == sorted({bucket.round for bucket in job})
    assert of(plan, "abc", kind) is of(plan, "abc", kind)


def test_a_server_that_ends_and_one_that_comes_back_make_no_plan(made):
    plan = new_plan()
    for names in ("ac", "a", "ac", "abc", "bc", "abc"):
        of(plan, names, "nccl")
    assert made == [["a", "c"], ["a", "b", "c"]]


def test_a_server_with_other_needs_or_on_another_node_makes_a_plan(made):
    plan, others = new_plan(), shares(OUTLINE, 1, 4)
    of(plan, "abc", "nccl")
    plan.of(dict.fromkeys(NODES, others), NODES)
    plan.of(dict.fromkeys(NODES, others), NODES | {"c": ["z"]})
    plan.of(dict.fromkeys(NODES, others), None)
    assert len(made) == 4
