"""FP8 made at the owner: whoever has which rows or columns, values and scales are those of the whole tensor, and they travel together."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_plan import EXPERTS, cases

from moerl.config.schema.layout import Layout
from moerl.models import fp8_blocks, fp8_names
from moerl.types.push import TensorSpec
from moerl.weights.plan.buckets import deliveries
from moerl.weights.plan.fp8_pairs import is_ragged, with_scales
from moerl.weights.plan.plan_faults import faults
from moerl.weights.plan.senders import plan_transfers
from moerl.weights.plan.spec_tensors import box_of
from moerl.weights.plan.transfer_plan import PlannedTensor, RolloutLayout

NAME = "model.layers.0.mlp.down_proj.weight"
SIZES = st.integers(1, 400)


def planned(name, shape, *, cut_dim=None, expert=None, stage=0):
    return PlannedTensor(spec=TensorSpec(name=name, shape=shape, dtype="bfloat16"), stage=stage, expert=expert, cut_dim=cut_dim)


def matrix(shape, seed):
    """Every block on a scale of its own, and one block of zeros."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(-6, 7, fp8_names.scale_shape(shape), generator=generator).float().exp2()
    table.view(-1)[0] = 0
    factors = table.repeat_interleave(fp8_blocks.BLOCK, 0).repeat_interleave(fp8_blocks.BLOCK, 1)[: shape[0], : shape[1]]
    return (torch.randn(shape, generator=generator) * factors).bfloat16()


@settings(deadline=None, max_examples=60)
@given(
    rows=SIZES,
    columns=SIZES,
    cut=st.sampled_from([(0, 1), (0, 2), (0, 3), (1, 2), (1, 4)]),
    part_bytes=st.sampled_from([500, 10_000, 10**9]),
    scale_format=st.sampled_from(["float32", "ue8m0"]),
    seed=st.integers(0, 9),
)
def test_shards_of_any_size_make_the_bytes_of_the_whole_tensor(rows, columns, cut, part_bytes, scale_format, seed):
    dim, num_shards = cut
    shape = (rows * num_shards, columns) if dim == 0 else (rows, columns * num_shards)
    whole = matrix(shape, seed)
    starts = [tuple(shard * shape[axis] // num_shards if axis == dim else 0 for axis in (0, 1)) for shard in range(num_shards)]
    shards = whole.chunk(num_shards, dim=dim)
    maxima = [fp8_blocks.block_maxima(shard, start, shape) for shard, start in zip(shards, starts, strict=True)]
    everywhere = torch.stack(maxima).amax(dim=0)
    found = {
        NAME: torch.full(shape, float("nan")).to(torch.float8_e4m3fn),
        NAME + fp8_names.SCALE_SUFFIX: torch.full(fp8_names.scale_shape(shape), float("nan")),
    }
    layout = Layout(ranks=num_shards, tp=num_shards)
    tensors = with_scales([planned(NAME, shape, cut_dim=dim)])
    rollout = RolloutLayout(num_servers=1, gpus_per_server=1, gpus_per_node=1)
    plan = plan_transfers(tensors, layout, rollout, num_experts=0, part_bytes=part_bytes)
    boxes = list(plan.boxes())
    for part in plan.network.part.tolist():
        name, shard, (start, size) = boxes[part][0].name, plan.parts.shard[part], boxes[part][1:]
        scales = fp8_blocks.scales_of(everywhere if is_ragged(shape, dim, num_shards) else maxima[shard], scale_format)
        if name == NAME:
            begin = tuple(first - offset for first, offset in zip(start, starts[shard], strict=True))
            box_of(found[name], start, size).copy_(fp8_blocks.quantized_box(box_of(shards[shard], begin, size), start, scales))
        else:
            box_of(found[name], start, size).copy_(box_of(scales, start, size))
    values, scales = fp8_blocks.quantized(whole, scale_format)
    assert torch.equal(found[NAME].view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(found[NAME + fp8_names.SCALE_SUFFIX], scales)


def test_what_published_checkpoints_do_not_quantize_stays():
    tensors = [
        planned("model.embed_tokens.weight", (300, 200)),
        planned("model.layers.0.mlp.gate.weight", (8, 200)),
        planned("model.layers.0.mlp.experts.7.up_proj.weight", (300, 200), expert=7, cut_dim=0),
    ]
    *others, values, scales = with_scales(tensors)
    assert others == tensors[:2]
    assert values == replace(tensors[2], spec=replace(tensors[2].spec, dtype="float8_e4m3fn"))
    spec = TensorSpec(name=values.name + "_scale_inv", shape=(3, 2), dtype="float32")
    assert scales == replace(tensors[2], spec=spec, scales_of=values.name)


def fp8_model(stages):
    """On every stage a matrix and a norm, experts on the last; no size is a multiple of a block."""
    found = []
    for stage in range(stages):
        layer = f"model.layers.{stage}"
        found += [planned(f"{layer}.self_attn.o_proj.weight", (200, 360), cut_dim=1, stage=stage)]
        found += [planned(f"{layer}.norm.weight", (200,), stage=stage)]
    for expert in range(EXPERTS):
        name = f"model.layers.{stages - 1}.mlp.experts.{expert}.up_proj.weight"
        found += [planned(name, (300, 150), cut_dim=0, expert=expert, stage=stages - 1)]
    return with_scales(found)


@settings(deadline=None, max_examples=40)
@given(case=cases(), bucket_bytes=st.sampled_from([1, 20_000, 10**6]))
def test_every_piece_of_scales_is_in_the_bucket_of_its_values_and_nothing_is_lost(case, bucket_bytes):
    layout, rollout, _, _ = case
    plan = plan_transfers(fp8_model(layout.pp), layout, rollout, num_experts=EXPERTS, part_bytes=10_000)
    assert faults(plan, EXPERTS) == []
    found = deliveries(plan, bucket_bytes=bucket_bytes)
    arrived = [{tensor.name: torch.zeros(tensor.shape, dtype=torch.int) for tensor in found.tensors} for _ in range(rollout.num_gpus)]
    for bucket in (bucket for job in found.jobs.values() for bucket in job):
        for entry in bucket.entries:
            for reader in bucket.readers:
                box_of(arrived[reader][entry.name], entry.start, entry.shape).add_(1)
            if entry.name.endswith(fp8_names.SCALE_SUFFIX):
                first = tuple(place * fp8_blocks.BLOCK for place in entry.start)
                assert any(_has(other, entry.name.removesuffix(fp8_names.SCALE_SUFFIX), first) for other in bucket.entries)
    for name in (tensor.name for tensor in found.tensors if tensor.name.endswith(fp8_names.SCALE_SUFFIX)):
        for held in arrived:
            values = held[name.removesuffix(fp8_names.SCALE_SUFFIX)]
            assert values.min() == values.max() == held[name].min() == held[name].max() <= 1


def _has(entry, name, place):
    inside = (start <= at < start + size for start, at, size in zip(entry.start, place, entry.shape, strict=True))
    return entry.name == name and all(inside)


@pytest.mark.parametrize(("num_shards", "ragged"), [(1, False), (2, False), (4, True)])
def test_only_edges_inside_blocks_need_an_exchange(num_shards, ragged):
    assert is_ragged((512 + 256, 100), 0, num_shards) is ragged
    assert not is_ragged((512 + 256, 100), None, num_shards)
