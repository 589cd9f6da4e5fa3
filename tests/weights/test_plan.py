"""Plans of a push: every reader gets every byte once, from a rank that has it, and no card is loaded more than it must be."""

import contextlib
import re
from collections import Counter, defaultdict
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from moerl.config.schema.layout import Layout
from moerl.types.errors import WeightError
from moerl.types.push import TensorSpec
from moerl.weights.plan import tensor_parts
from moerl.weights.plan.buckets import deliveries, in_order
from moerl.weights.plan.plan_faults import faults
from moerl.weights.plan.run_plan import relays_of
from moerl.weights.plan.schedule import bound_seconds, incomplete_bytes, seconds
from moerl.weights.plan.senders import plan_transfers
from moerl.weights.plan.tensor_specs import item_bytes
from moerl.weights.plan.transfer_plan import PlannedTensor, RolloutLayout, holders, readers

EXPERTS = 8


def planned(name: str, num_bytes: int, *, stage: int, expert: int | None, cut_dim: int | None) -> PlannedTensor:
    return PlannedTensor(spec=TensorSpec(name=name, shape=(num_bytes,), dtype="uint8"), stage=stage, expert=expert, cut_dim=cut_dim)


def tensors_of(stages: int, *, dense_bytes: int = 1000, expert_bytes: int = 400, experts: int = EXPERTS) -> list[PlannedTensor]:
    found = []
    for stage in range(stages):
        found.append(planned(f"{stage}.norm", 7, stage=stage, expert=None, cut_dim=None))
        found.append(planned(f"{stage}.attention", dense_bytes, stage=stage, expert=None, cut_dim=0))
        for expert in range(experts):
            found.append(planned(f"{stage}.{expert}", expert_bytes, stage=stage, expert=expert, cut_dim=0))
    return found


@st.composite
def cases(draw):
    tp, cp, etp = (draw(st.sampled_from([1, 2])) for _ in range(3))
    pp, ep = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 4]))
    per_stage = int(np.lcm(tp * cp, ep * etp)) * draw(st.sampled_from([1, 2]))
    layout = Layout(ranks=per_stage * pp, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)
    gpus_per_server = draw(st.sampled_from([1, 2, 4, 8]))
    rollout = RolloutLayout(
        num_servers=draw(st.integers(1, 4)), gpus_per_server=gpus_per_server, gpus_per_node=draw(st.sampled_from([1, 2, 4, 8]))
    )  # fmt: skip
    return layout, rollout, draw(st.integers(1, 2000)), draw(st.integers(1, 500))


@given(cases(), st.sampled_from([1, 64, 10_000]))
def test_every_reader_gets_every_byte_once_from_a_rank_that_holds_it(case, part_bytes):
    layout, rollout, dense_bytes, expert_bytes = case
    tensors = tensors_of(layout.pp, dense_bytes=dense_bytes, expert_bytes=expert_bytes)
    plan = plan_transfers(tensors, layout, rollout, num_experts=EXPERTS, part_bytes=part_bytes)
    assert faults(plan, EXPERTS) == []
    total = plan.received() + plan.spread_in_node()
    wanted = np.zeros(rollout.num_gpus, dtype=np.int64)
    for tensor in tensors:
        wanted[list(readers(tensor, rollout, EXPERTS))] += tensor.num_bytes
    np.testing.assert_array_equal(total, wanted)
    assert plan.sent().sum() == plan.received().sum()


@given(st.data())
def test_parts_make_up_a_tensor_and_end_where_shares_of_a_servers_gpus_do(data):
    rows, columns, cut_dim = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40)), data.draw(st.sampled_from([0, 1]))
    expert = data.draw(st.sampled_from([None, 0]))
    layout = Layout(ranks=4, tp=data.draw(st.sampled_from([1, 2, 4])), etp=data.draw(st.sampled_from([1, 2, 4])))
    gpus, shares = data.draw(st.sampled_from([(1, 1), (2, 2), (4, 2), (8, 1)]))
    rollout = RolloutLayout(num_servers=1, gpus_per_server=gpus, gpus_per_node=4, expert_parallel=shares)
    spec = TensorSpec(name="a", shape=(rows, columns), dtype="bfloat16")
    tensor = PlannedTensor(spec=spec, stage=0, expert=expert, cut_dim=cut_dim)
    with mock.patch.object(tensor_parts, "SHARE_BYTES", 1):
        parts = tensor_parts.parts_of([tensor], layout, rollout, part_bytes=data.draw(st.integers(1, 4000)))
    count = np.zeros((rows, columns), dtype=int)
    width = min(4, gpus if expert is None else gpus // shares)
    share = -(-spec.shape[cut_dim] // (width if tensor.num_bytes >= width else 1))
    for start, size, num_bytes in zip(parts.start.tolist(), parts.size.tolist(), parts.num_bytes.tolist(), strict=True):
        count[start[0] : start[0] + size[0], start[1] : start[1] + size[1]] += 1
        assert num_bytes == 2 * size[0] * size[1] > 0
        assert start[cut_dim] // share == (start[cut_dim] + size[cut_dim] - 1) // share
    assert (count == 1).all()


def test_small_shares_get_no_parts_of_their_own():
    def num_parts(num_bytes):
        tensor = planned("a", num_bytes, stage=0, expert=None, cut_dim=0)
        rollout = RolloutLayout(num_servers=1, gpus_per_server=4, gpus_per_node=4)
        return len(tensor_parts.parts_of([tensor], Layout(ranks=1), rollout, part_bytes=2**25).tensor)

    assert num_parts(4 * tensor_parts.SHARE_BYTES - 1) == 1
    assert num_parts(4 * tensor_parts.SHARE_BYTES) == 4


@given(cases(), st.integers(500, 3000))
def test_a_round_of_the_schedule_uses_each_card_once_and_nothing_is_lost(case, bucket_bytes):
    layout, rollout, dense_bytes, expert_bytes = case
    tensors = tensors_of(layout.pp, dense_bytes=dense_bytes, expert_bytes=expert_bytes)
    plan = plan_transfers(tensors, layout, rollout, num_experts=EXPERTS, part_bytes=500)
    found = in_order(deliveries(plan, bucket_bytes=bucket_bytes, by_node=True).jobs)
    assert max(bucket.num_bytes for bucket in found) <= bucket_bytes
    for card in ([bucket.sender for bucket in found], [bucket.readers[0] for bucket in found]):
        pairs = list(zip((bucket.round for bucket in found), card, strict=True))
        assert len(set(pairs)) == len(pairs)
    received = np.zeros(rollout.num_gpus, dtype=np.int64)
    for bucket in found:
        received[bucket.readers[0]] += sum(entry.num_bytes for entry in bucket.entries)
    np.testing.assert_array_equal(received, plan.received())
    most = (1 + found[-1].round) * max(bucket.num_bytes for bucket in found)
    assert bound_seconds(plan, bytes_per_second=1.0) <= seconds(found, bytes_per_second=1.0) <= most


@given(cases(), st.integers(0, 1000))
def test_ranks_relay_to_their_own_node_what_none_of_it_holds_each_in_one_bucket_at_a_time(case, seed):
    layout, rollout, dense_bytes, expert_bytes = case
    nodes = rollout.node_numbers().tolist()
    assume(layout.ranks >= rollout.num_nodes)
    rank_nodes = [rank % rollout.num_nodes for rank in np.random.default_rng(seed).permutation(layout.ranks).tolist()]
    relays = relays_of([(node, rank) for rank, node in enumerate(rank_nodes)], [(node, None) for node in nodes])
    tensors = tensors_of(layout.pp, dense_bytes=dense_bytes, expert_bytes=expert_bytes)
    plan = plan_transfers(tensors, layout, rollout, num_experts=EXPERTS, part_bytes=500, relays=relays)
    assert faults(plan, EXPERTS) == []
    found = in_order(deliveries(plan, bucket_bytes=1000, by_node=True).jobs)
    crossing = [bucket for bucket in found if bucket.lender != bucket.sender]
    for bucket in found:
        assert {rank_nodes[bucket.lender]} == {nodes[reader] for reader in bucket.readers}
    for card, buckets in (("sender", found), ("lender", crossing)):
        turns = [(bucket.round, getattr(bucket, card)) for bucket in buckets]
        assert len(set(turns)) == len(turns)
    wanted = 0
    for tensor, shard in {(plan.parts.tensor[part], plan.parts.shard[part]) for part in range(len(plan.parts.tensor))}:
        is_it = (plan.parts.tensor == tensor) & (plan.parts.shard == shard)
        held = {rank_nodes[rank] for rank in holders(plan.tensors[tensor], int(shard), layout, EXPERTS)}
        needed = {nodes[gpu] for gpu in readers(plan.tensors[tensor], rollout, EXPERTS)}
        wanted += len(needed - held) * plan.parts.num_bytes[is_it].sum()
    # What every tensor-parallel rank has whole goes with one's shards, also where another one is nearer.
    most = wanted + (rollout.num_nodes * 7 * layout.pp if layout.tp > 1 else 0)
    assert wanted <= sum(entry.num_bytes for bucket in crossing for entry in bucket.entries) == plan.received().sum() <= most


@pytest.mark.parametrize(("shares", "batches"), [(1, 4), (2, 2)])
def test_over_a_network_experts_come_before_all_else_and_each_batch_by_itself(shares, batches):
    """Of 8000 bytes by GPU: 8 attentions of 9, and 20 experts of 72, or 40 where two GPUs share them."""
    tensors = [replace(tensor, spec=replace(tensor.spec, name=f"{layer}.{tensor.name}")) for layer in range(9) for tensor in tensors_of(2)]
    rollout = RolloutLayout(num_servers=2, gpus_per_server=2, gpus_per_node=2, expert_parallel=shares)
    plan = plan_transfers(tensors, Layout(ranks=4, pp=2, ep=2), rollout, num_experts=EXPERTS, part_bytes=500)
    kinds = {
        tensor.name: (tensor.expert is None, tensor.stage, batch) for tensor, batch in zip(plan.tensors, batches_of(plan), strict=True)
    }
    assert Counter((is_late, stage) for is_late, stage, _ in set(kinds.values())) == {
        (False, 0): batches,
        (False, 1): batches,
        (True, 0): 2,
        (True, 1): 2,
    }
    for job in deliveries(plan, bucket_bytes=500, by_node=True).jobs.values():
        by_reader = defaultdict(list)
        for bucket in job:
            (kind,) = {kinds[entry.name] for entry in bucket.entries}
            by_reader[bucket.readers].append(kind)
        assert list(by_reader.values()) == [sorted(turns) for turns in by_reader.values()]
        assert {is_late for turns in by_reader.values() for is_late, _, _ in turns} == {False, True}


def batches_of(plan):
    """By tensor."""
    found = np.zeros(len(plan.tensors), dtype=np.int64)
    found[plan.parts.tensor] = plan.parts.batch
    assert (found[plan.parts.tensor] == plan.parts.batch).all(), "a tensor has parts of one batch"
    return found.tolist()


@given(cases(), st.integers(500, 3000))
def test_what_is_incomplete_at_a_time_is_counted(case, bucket_bytes):
    """Against bytes held for each GPU, one after the other."""
    layout, rollout, dense_bytes, expert_bytes = case
    tensors = tensors_of(layout.pp, dense_bytes=dense_bytes, expert_bytes=expert_bytes)
    plan = plan_transfers(tensors, layout, rollout, num_experts=EXPERTS, part_bytes=500)
    buckets, sizes = in_order(deliveries(plan, bucket_bytes=bucket_bytes, by_node=True).jobs), {t.name: t.num_bytes for t in tensors}
    most = 0
    for gpu in range(rollout.num_gpus):
        came = defaultdict(int)
        for entry in (entry for bucket in buckets if gpu in bucket.readers for entry in bucket.entries):
            came[entry.name] += entry.num_bytes
            begun = {name: size for name, size in sizes.items() if 0 < came[name] < size}
            most = max(most, sum(begun.values()))
    assert incomplete_bytes(buckets, sizes) == most


ROLLOUT = RolloutLayout(num_servers=8, gpus_per_server=32, gpus_per_node=8)
SCALES = {
    "deepseek-v3": (Layout(ranks=256, pp=16, ep=16, first_stage_layers=3, last_stage_layers=2), 256, ROLLOUT),
    "qwen3-235b": (Layout(ranks=256, tp=4, pp=4, cp=2, ep=16, last_stage_layers=22), 128, replace(ROLLOUT, num_servers=4)),
    "kimi-k2": (Layout(ranks=256, tp=8, pp=8, cp=4, ep=32, last_stage_layers=5), 384, ROLLOUT),
}


@pytest.mark.parametrize("name", SCALES)
def test_at_full_scale_a_gpu_receives_what_it_must_and_hardly_more(name):
    """With one layer a stage; their real tensors are in tests/models/test_scale.py."""
    layout, experts, rollout = SCALES[name]
    tensors = tensors_of(layout.pp, dense_bytes=2**29, expert_bytes=2**25, experts=experts)
    plan = plan_transfers(tensors, layout, rollout, num_experts=experts, part_bytes=2**24)
    assert faults(plan, experts) == []
    of_experts = sum(tensor.num_bytes for tensor in tensors if tensor.expert is not None)
    others = sum(tensor.num_bytes for tensor in tensors) - of_experts
    assert plan.received().max() <= 1.05 * (of_experts / rollout.gpus_per_server + others / rollout.gpus_per_node)


def test_the_load_is_spread_over_ranks_that_hold_the_same():
    layout = Layout(ranks=8, ep=2)
    plan = plan_transfers(
        tensors_of(1), layout, RolloutLayout(num_servers=4, gpus_per_server=2, gpus_per_node=2), num_experts=EXPERTS, part_bytes=50
    )
    assert plan.sent().min() > 0.8 * plan.sent().mean()
    assert plan.sent().max() < 1.2 * plan.sent().mean()


def test_holders_are_in_megatrons_order():
    dense = planned("a", 1, stage=1, expert=None, cut_dim=0)
    layout = Layout(ranks=16, tp=2, pp=2, cp=2, ep=2, etp=2)
    assert list(holders(dense, 1, layout, EXPERTS)) == [9, 11, 13, 15]
    assert list(holders(replace(dense, cut_dim=None), 0, layout, EXPERTS)) == [8, 9, 10, 11, 12, 13, 14, 15]
    assert list(holders(replace(dense, expert=5), 1, layout, EXPERTS)) == [11, 15]
    assert list(holders(replace(dense, expert=3, stage=0), 0, layout, EXPERTS)) == [0, 4]


# -- what a wrong plan is told ---------------------------------------------------------------------------------


def a_plan():
    rollout = RolloutLayout(num_servers=2, gpus_per_server=4, gpus_per_node=4)
    return plan_transfers(tensors_of(2), Layout(ranks=8, pp=2, ep=2), rollout, num_experts=EXPERTS, part_bytes=300)


def without_row(transfers, row):
    return replace(transfers, **{name: np.delete(getattr(transfers, name), row) for name in ("source", "target", "part")})


def with_row_twice(transfers, row):
    return replace(
        transfers, **{name: np.append(getattr(transfers, name), getattr(transfers, name)[row]) for name in ("source", "target", "part")}
    )


def changed(transfers, name, row, value):
    column = getattr(transfers, name).copy()
    column[row] = value
    return replace(transfers, **{name: column})


def other_of_node(plan):
    """Neither the GPU that passes the first part on nor the one that gets it."""
    return next(gpu for gpu in range(4) if gpu not in (plan.spread.source[0], plan.spread.target[0]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: replace(plan, network=without_row(plan.network, 0)), r"1 parts never arrive: part \d+ \(0.0, shard 0\) on GPU 0"),
        (lambda plan: replace(plan, spread=without_row(plan.spread, 0)), "1 parts never arrive"),
        (lambda plan: replace(plan, network=with_row_twice(plan.network, 3)), "1 parts arrive more than once"),
        (lambda plan: replace(plan, network=changed(plan.network, "target", 0, 3)), "1 parts arrive where nobody reads them"),
        (lambda plan: replace(plan, network=changed(plan.network, "source", 0, 7)), "1 parts are sent by a rank that does not hold them"),
        (lambda plan: replace(plan, spread=changed(plan.spread, "source", 0, 4)), "are passed on to another node"),
        (lambda plan: replace(plan, spread=changed(plan.spread, "source", 0, other_of_node(plan))), "by a GPU that did not get them"),
    ],
    ids=["lost", "not-spread", "twice", "astray", "wrong-sender", "other-node", "wrong-relay"],
)  # fmt: skip
def test_a_fault_is_named(change, message):
    assert any(re.search(message, fault) for fault in faults(change(a_plan()), EXPERTS))


def test_a_dtype_has_the_bytes_that_torch_gives_it_and_others_are_refused():
    dtypes = {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype) and str(dtype) == f"torch.{name}"}
    found = {}
    for name in dtypes:
        with contextlib.suppress(WeightError):
            found[name] = item_bytes(TensorSpec(name="a", shape=(1,), dtype=name))
    assert found == {name: dtypes[name].itemsize for name in found}
    assert set(found) >= {"float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e8m0fnu", "uint8", "int32"}
    with pytest.raises(WeightError, match="'float7' is no dtype of a weight"):
        item_bytes(TensorSpec(name="a", shape=(1,), dtype="float7"))
