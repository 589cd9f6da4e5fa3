"""From what a trainer holds and servers need to the buckets that cross, in one process: every reader gets every byte of its share once."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_plan import EXPERTS, cases

from moerl.cluster.run_secret import RunSecret
from moerl.config.schema.layout import Layout
from moerl.models.expert_stacks import stored_name
from moerl.types.errors import WeightError
from moerl.types.push import TensorSpec
from moerl.weights.plan.buckets import ALIGNMENT, deliveries, in_order, manifest_of
from moerl.weights.plan.run_plan import Outline, plan_deliveries, plan_of_run
from moerl.weights.plan.senders import plan_transfers
from moerl.weights.plan.spec_tensors import box_of
from moerl.weights.plan.transfer_plan import PlannedTensor, holders, readers
from moerl.weights.send import WeightSender
from moerl.weights.verify.digest import tensor_digest

SPECS = {
    "embed": TensorSpec(name="embed", shape=(13, 6), dtype="float32"),
    "norm": TensorSpec(name="norm", shape=(7,), dtype="float32"),
    "scale": TensorSpec(name="scale", shape=(), dtype="float32"),
    "nothing": TensorSpec(name="nothing", shape=(0, 5), dtype="float32"),
    "out": TensorSpec(name="out", shape=(6, 8), dtype="float32"),
}
CUT = {"embed": 0, "norm": None, "scale": None, "nothing": None, "out": 1}


def tensors_of(stages):
    """Of the last stage also the experts, each with a matrix of its own and with a part of a stack."""
    found = [
        PlannedTensor(spec=replace(spec, name=f"{stage}.{name}"), stage=stage, expert=None, cut_dim=CUT[name])
        for stage in range(stages)
        for name, spec in SPECS.items()
    ]
    last = stages - 1
    for expert in range(EXPERTS):
        own = TensorSpec(name=f"{last}.experts.{expert}.up", shape=(4, 3), dtype="bfloat16")
        part = TensorSpec(name=f"{last}.stack[{expert}]", shape=(2, 3), dtype="float32")
        found += [PlannedTensor(spec=own, stage=last, expert=expert, cut_dim=0)]
        found += [PlannedTensor(spec=part, stage=last, expert=expert, cut_dim=None)]
    return found


def values_of(specs):
    generator = torch.Generator().manual_seed(3)
    return {spec.name: torch.randn(spec.shape, generator=generator).to(getattr(torch, spec.dtype)) for spec in specs}


def senders(found, values):
    return {
        rank: WeightSender("ipc", job, lambda name, start, shape: box_of(values[name], start, shape), seconds=1, secret=RunSecret.new())
        for rank, job in found.jobs.items()
    }


@settings(deadline=None, max_examples=40)
@given(case=cases(), bucket_bytes=st.sampled_from([1, 200, 10_000]))
def test_every_reader_gets_every_byte_of_its_share_once_from_ranks_that_hold_it(case, bucket_bytes):
    layout, rollout, _, _ = case
    plan = plan_transfers(tensors_of(layout.pp), layout, rollout, num_experts=EXPERTS, part_bytes=64)
    found = deliveries(plan, bucket_bytes=bucket_bytes)
    values = values_of(found.tensors)
    received = [{name: torch.full_like(tensor, float("nan")) for name, tensor in values.items()} for _ in range(rollout.num_gpus)]
    num_bytes = [0] * rollout.num_gpus
    sending = senders(found, values)
    try:
        for rank, job in found.jobs.items():
            for bucket in job:
                data = sending[rank].pack(bucket.index)
                for gpu in bucket.readers:
                    num_bytes[gpu] += sum(entry.num_bytes for entry in bucket.entries)
                    for entry in bucket.entries:
                        target = box_of(received[gpu][entry.name], entry.start, entry.shape)
                        target.copy_(data[entry.offset : entry.offset + entry.num_bytes].view(target.dtype).view(target.shape))
    finally:
        for sender in sending.values():
            sender.close()
    for gpu in range(rollout.num_gpus):
        mine = [tensor for tensor in plan.tensors if gpu in readers(tensor, rollout, EXPERTS)]
        assert num_bytes[gpu] == sum(tensor.num_bytes for tensor in mine)
        for name in {tensor.name for tensor in mine if tensor.name == stored_name(tensor.name)}:
            assert torch.equal(received[gpu][name], values[name]), (gpu, name)
    _check_senders(plan, found, layout)


def _check_senders(plan, found, layout):
    by_name = {tensor.name: tensor for tensor in plan.tensors}
    for rank, job in found.jobs.items():
        for entry in (entry for bucket in job for entry in bucket.entries):
            tensor = by_name.get(entry.name)
            tensor = by_name[f"{entry.name}[{entry.start[0]}]"] if tensor is None else tensor
            assert any(rank in holders(tensor, shard, layout, EXPERTS) for shard in range(2))


@given(case=cases(), bucket_bytes=st.integers(1, 500))
def test_buckets_are_full_aligned_and_in_order(case, bucket_bytes):
    layout, rollout, _, _ = case
    plan = plan_transfers(tensors_of(layout.pp), layout, rollout, num_experts=EXPERTS, part_bytes=64)
    for rank, job in deliveries(plan, bucket_bytes=bucket_bytes).jobs.items():
        assert [(bucket.sender, bucket.index) for bucket in job] == [(rank, index) for index in range(len(job))]
        for bucket in job:
            assert bucket.num_bytes <= bucket_bytes or len(bucket.entries) == 1
            assert [entry.offset % ALIGNMENT for entry in bucket.entries] == [0] * len(bucket.entries)
            assert [entry.name for entry in bucket.entries] == sorted(entry.name for entry in bucket.entries)


@given(case=cases(), by_node=st.booleans())
def test_all_keep_to_one_order_in_which_nobody_has_two_buckets_of_a_round(case, by_node):
    layout, rollout, _, _ = case
    plan = plan_transfers(tensors_of(layout.pp), layout, rollout, num_experts=EXPERTS, part_bytes=64)
    jobs = deliveries(plan, bucket_bytes=200, by_node=by_node).jobs
    found = in_order(jobs)
    assert {rank: tuple(bucket for bucket in found if bucket.sender == rank) for rank in jobs} == jobs
    assert [bucket.round for bucket in found] == sorted(bucket.round for bucket in found)
    sending = [(bucket.round, bucket.sender) for bucket in found]
    reading = [(bucket.round, reader) for bucket in found for reader in (bucket.readers[:1] if by_node else bucket.readers)]
    assert len(set(sending)) == len(sending)
    assert len(set(reading)) == len(reading)


@given(sizes=st.lists(st.integers(1, 100), min_size=1, max_size=30), bucket_bytes=st.integers(200, 1500))
def test_buckets_of_a_batch_are_about_as_few_as_can_be_and_of_one_size(sizes, bucket_bytes):
    """Rows of ALIGNMENT bytes, so that no space is lost between pieces."""
    tensors = [
        PlannedTensor(spec=TensorSpec(name=f"{number:02}", shape=(size, ALIGNMENT), dtype="uint8"), stage=0, expert=None, cut_dim=None)
        for number, size in enumerate(sizes)
    ]
    outline = Outline(tensors=tensors, layout=Layout(), bucket_bytes=bucket_bytes * ALIGNMENT)
    (job,) = deliveries_of(outline).jobs.values()
    found = [bucket.num_bytes // ALIGNMENT for bucket in job]
    share = sum(sizes) / len(job)
    assert max(found) <= bucket_bytes
    assert max(found) < share + max(sizes)
    assert len(job) <= 1 + -(-sum(sizes) // (bucket_bytes - max(sizes) + 1))


def deliveries_of(outline, num_processes=1):
    names = tuple(stored_name(tensor.name) for tensor in outline.tensors)
    return deliveries(plan_of_run(outline, {"a": (names,) * num_processes}), bucket_bytes=outline.bucket_bytes)


def test_stacks_of_experts_are_one_tensor_with_a_piece_from_each_owner():
    found = deliveries_of(Outline(tensors=tensors_of(1), layout=Layout(ranks=2, ep=2), bucket_bytes=10_000))
    values = values_of(found.tensors)
    manifest = manifest_of(found, {rank: sender.digests() for rank, sender in senders(found, values).items()}, version=1)
    assert values["0.stack"].shape == (EXPERTS, 2, 3)
    assert [(piece.start, piece.shape, piece.ranks) for piece in manifest.pieces["0.stack"]] == [
        ((expert, 0, 0), (1, 2, 3), (expert // 4,)) for expert in range(EXPERTS)
    ]
    for name, pieces in manifest.pieces.items():
        assert [piece.digest for piece in pieces] == [tensor_digest(box_of(values[name], piece.start, piece.shape)) for piece in pieces]


def test_replicas_that_have_diverged_are_named():
    layout = Layout(ranks=2)
    names = tuple(stored_name(tensor.name) for tensor in tensors_of(1))
    plan = plan_of_run(Outline(tensors=tensors_of(1), layout=layout, bucket_bytes=10_000), {"a": (names,)})
    two_nodes = replace(plan.rollout, num_servers=2, gpus_per_node=1)
    found = deliveries(plan_transfers(tensors_of(1), layout, two_nodes, num_experts=EXPERTS, part_bytes=64), bucket_bytes=10_000)
    values = values_of(found.tensors)
    digests = {rank: sender.digests() for rank, sender in senders(found, values).items()}
    first, second = ({(entry.name, entry.start) for bucket in found.jobs[rank] for entry in bucket.entries} for rank in (0, 1))
    assert first & second
    manifest = manifest_of(found, digests, version=1)
    held = {(name, piece.start): piece.ranks for name, pieces in manifest.pieces.items() for piece in pieces}
    assert held == {key: tuple(rank for rank, keys in enumerate((first, second)) if key in keys) for key in first | second}
    digests[1] = ["0" * 32] * len(digests[1])
    with pytest.raises(WeightError, match="trainer ranks 0 and 1 hold copies of it, and their bytes differ"):
        manifest_of(found, digests, version=1)


# -- what servers need -----------------------------------------------------------------------------------------


def shares(outline, num_shares, num_processes):
    """Needs of a server that spreads experts over its processes."""
    names = {stored_name(tensor.name): tensor.expert for tensor in outline.tensors if "stack" not in tensor.name}
    size, width = EXPERTS // num_shares, num_processes // num_shares
    return tuple(
        tuple(name for name, expert in names.items() if expert is None or expert // size == process // width)
        for process in range(num_processes)
    )


def an_outline():
    return Outline(
        tensors=[tensor for tensor in tensors_of(1) if "stack" not in tensor.name], layout=Layout(ranks=2, ep=2), bucket_bytes=10_000
    )


@pytest.mark.parametrize(("num_shares", "num_processes"), [(1, 1), (1, 2), (2, 2), (2, 4), (8, 8)])
def test_experts_go_only_to_the_processes_that_need_them(num_shares, num_processes):
    outline = an_outline()
    needs = {server: shares(outline, num_shares, num_processes) for server in ("a", "b")}
    found = plan_deliveries(outline, needs)
    got = [set() for _ in range(2 * num_processes)]
    for job in found.jobs.values():
        for bucket in job:
            for reader in bucket.readers:
                got[reader].update(entry.name for entry in bucket.entries)
    assert got == [set(names) for processes in needs.values() for names in processes]


def test_a_server_whose_processes_share_experts_otherwise_is_refused_before_anything_is_sent():
    outline = an_outline()
    first, second = shares(outline, 2, 2)
    other = ("0.experts.4.up", *(name for name in first if name != "0.experts.3.up"))
    with pytest.raises(
        WeightError, match="b, process 0, needs and would not get 0.experts.4.up; b, process 0, does not need and would get"
    ):
        plan_deliveries(outline, {"a": (first, second), "b": (other, (*second, "0.experts.3.up"))})


def test_servers_of_different_sizes_are_refused():
    outline = an_outline()
    with pytest.raises(WeightError, match=r"equally many model processes, and have \{'a': 1, 'b': 2\}"):
        plan_deliveries(outline, {"a": shares(outline, 1, 1), "b": shares(outline, 2, 2)})


def test_unequal_shares_of_experts_are_refused():
    outline = an_outline()
    uneven = (*shares(outline, 2, 2)[0], "0.experts.7.up"), *shares(outline, 4, 4)[:2]
    with pytest.raises(WeightError, match="8 experts on 3 processes of a server in 3 different shares: shares must be equal"):
        plan_deliveries(outline, {"a": uneven})
