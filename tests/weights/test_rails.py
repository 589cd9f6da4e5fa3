"""The push's schedule with rails against the one without: who sends what to whom, and how evenly."""

from dataclasses import replace

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from test_plan import EXPERTS, cases, tensors_of

from moerl.config.schema.layout import Layout
from moerl.weights.plan.buckets import deliveries, in_order
from moerl.weights.plan.plan_faults import faults
from moerl.weights.plan.run_plan import Outline, plan_deliveries
from moerl.weights.plan.schedule import seconds
from moerl.weights.plan.senders import RAIL_PARTS, plan_transfers
from moerl.weights.plan.transfer_plan import Rails, RolloutLayout

PART = 64


def rails_by_place(layout, rollout, *, gpus_per_node=8, cards=8):
    senders, readers = np.arange(layout.ranks) % gpus_per_node, np.arange(rollout.num_gpus) % rollout.gpus_per_node
    return Rails(senders=tuple((senders * cards // gpus_per_node).tolist()), readers=tuple((readers * cards // gpus_per_node).tolist()))


def both(tensors, layout, rollout, rails, *, part_bytes=PART):
    sizes = dict(num_experts=EXPERTS, part_bytes=part_bytes)
    return [plan_transfers(tensors, layout, rollout, **sizes, rails=heeded) for heeded in (rails, None)]


@given(cases(), st.data())
def test_on_any_rails_every_reader_gets_every_part_once_and_cards_stay_about_as_even(case, data):
    layout, rollout, dense_bytes, expert_bytes = case
    numbers = st.integers(0, data.draw(st.integers(0, 7)))
    rails = Rails(
        senders=tuple(data.draw(st.lists(numbers, min_size=layout.ranks, max_size=layout.ranks))),
        readers=tuple(data.draw(st.lists(numbers, min_size=rollout.num_gpus, max_size=rollout.num_gpus))),
    )
    tensors = tensors_of(layout.pp, dense_bytes=dense_bytes, expert_bytes=expert_bytes)
    heeding, heedless = both(tensors, layout, rollout, rails)
    assert faults(heeding, EXPERTS) == []
    assert heeding.received().sum() == heedless.received().sum()
    # What is added at once, a chunk or the experts of a batch, and the slack.
    step = max(dense_bytes + 7, expert_bytes * EXPERTS) * layout.pp
    assert heeding.received().max() <= heedless.received().max() + RAIL_PARTS * PART + step


@given(cases())
@example((Layout(ranks=2, tp=1, pp=1, cp=1, ep=1, etp=1), RolloutLayout(num_servers=2, gpus_per_server=2, gpus_per_node=4), 65, 1))
def test_where_every_process_is_on_one_rail_rails_change_nothing(case):
    layout, rollout, dense_bytes, expert_bytes = case
    rails = Rails(senders=(0,) * layout.ranks, readers=(0,) * rollout.num_gpus)
    tensors = tensors_of(layout.pp, dense_bytes=dense_bytes, expert_bytes=expert_bytes)
    heeding, heedless = both(tensors, layout, rollout, rails)
    assert heeding.share_on_rails(rails) == heedless.share_on_rails(rails) == 1.0
    np.testing.assert_array_equal(heeding.sent(), heedless.sent())
    np.testing.assert_array_equal(heeding.received(), heedless.received())


def a_fleet(*, ep):
    """Two nodes of ranks, and four of servers; experts on each GPU of a node on both sides where ep=8."""
    layout = Layout(ranks=16, tp=1, cp=1, pp=1, ep=ep, etp=1)
    return layout, RolloutLayout(num_servers=4, gpus_per_server=8, gpus_per_node=8)


def test_all_bytes_stay_on_their_rails_where_holders_allow_it_and_the_schedule_is_as_long():
    layout, rollout = a_fleet(ep=8)
    rails, tensors = rails_by_place(layout, rollout), tensors_of(1, dense_bytes=40_000, expert_bytes=2000)
    heeding, heedless = both(tensors, layout, rollout, rails)
    assert heeding.share_on_rails(rails) > 0.99 and heedless.share_on_rails(rails) < 0.9
    heeding_s, heedless_s = (
        seconds(in_order(deliveries(plan, bucket_bytes=500, by_node=True).jobs), bytes_per_second=1.0) for plan in (heeding, heedless)
    )
    assert heeding_s <= 1.05 * heedless_s


def test_an_expert_that_one_rank_holds_crosses_rails_to_the_gpu_that_serves_it():
    layout, rollout = a_fleet(ep=2)
    rails = replace(rails_by_place(layout, rollout), senders=(0, 1) * 8)
    heeding, _ = both(tensors_of(1, dense_bytes=8), layout, rollout, rails)
    experts = np.array([heeding.tensors[tensor].expert is not None for tensor in heeding.parts.tensor])[heeding.network.part]
    pairs = zip(heeding.network.source[experts].tolist(), heeding.network.target[experts].tolist(), strict=True)
    assert {rails.readers[target] for _, target in pairs} == set(range(8))


def test_gpus_that_share_cards_have_fewer_rails_and_these_are_heeded():
    layout, rollout = a_fleet(ep=8)
    rails = rails_by_place(layout, rollout, cards=4)
    assert set(rails.senders) == set(rails.readers) == {0, 1, 2, 3}
    heeding, heedless = both(tensors_of(1, dense_bytes=40_000), layout, rollout, rails)
    assert heeding.share_on_rails(rails) > 0.99 > heedless.share_on_rails(rails)


def test_the_plan_of_a_run_heeds_the_rails_of_its_processes():
    layout, tensors = Layout(ranks=8, tp=1, cp=1, pp=1, ep=1, etp=1), tensors_of(1, dense_bytes=4000, experts=0)
    outline = Outline(tensors=tensors, layout=layout, bucket_bytes=1000)
    names = tuple(tensor.name for tensor in tensors)
    needs, nodes = {f"server {index}": (names,) * 4 for index in range(2)}, {"server 0": ("a",), "server 1": ("b",)}
    rails = Rails(senders=tuple(range(8)), readers=(7, 6, 5, 4, 3, 2, 1, 0))
    found = in_order(plan_deliveries(outline, needs, nodes, rails=rails).jobs)
    assert {rails.senders[bucket.sender] - rails.readers[bucket.readers[0]] for bucket in found} == {0}
    assert len(found) == len(in_order(plan_deliveries(outline, needs, nodes).jobs))
