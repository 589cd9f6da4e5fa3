"""The shipped layouts of the largest models: what all ranks hold together is the published checkpoint, no more and no less.

Megatron builds for real, on meta tensors, what a rank at every place of every layout holds (scale_ranks.py).
"""

from collections import Counter
from dataclasses import dataclass
from functools import cache
from math import prod

import pytest
import torch
from engine_ranks import run_ranks
from published_tensors import PUBLISHED_COUNTS, published_tensors
from scale_ranks import Place, Survey, read_survey, survey

from moerl.config.derive.model_configs import published_config, published_names
from moerl.config.load import load
from moerl.config.schema.layout import Layout
from moerl.config.schema.run_config import RunConfig
from moerl.models.bridge.rank_parameters import hf_names
from moerl.models.families.family_table import FAMILIES
from moerl.models.families.parts.family import Family, Rule
from moerl.models.shards import Sizes, cut_dim, merge, split
from moerl.types.push import TensorSpec
from moerl.weights.plan.buckets import deliveries, in_order
from moerl.weights.plan.plan_faults import faults
from moerl.weights.plan.schedule import bound_seconds, incomplete_bytes, seconds
from moerl.weights.plan.senders import plan_transfers
from moerl.weights.plan.tensor_specs import num_bytes
from moerl.weights.plan.transfer_plan import PlannedTensor, RolloutLayout, holders

RECIPES = [
    "grpo-deepseek-v3-32n8g-sync",
    "grpo-qwen3-235b-16n8g-sync",
    "grpo-qwen3-235b-32n8g-sync",
    "grpo-kimi-k2-32n8g-sync",
    "grpo-glm-4.5-8n8g-sync",
    "grpo-qwen3-30b-a3b-1n8g-sync",
]


@dataclass(frozen=True, kw_only=True)
class Case:
    config: RunConfig
    hf: dict
    found: Survey
    shapes: dict[str, set[tuple[int, ...]]]
    """Of a parameter's shards, by its global Megatron name."""
    holders: dict[str, Counter]
    """(stage, number of the shard) -> how many ranks have it."""

    @property
    def family(self) -> Family:
        return FAMILIES[self.hf["model_type"]]

    @property
    def num_experts(self) -> int:
        return self.family.transformer_config(self.hf)["num_moe_experts"]

    def num_shards_of(self, tensor: PlannedTensor) -> int:
        layout = self.config.train.layout
        return 1 if tensor.cut_dim is None else layout.tp if tensor.expert is None else layout.etp

    def num_shards(self, rule: Rule) -> int:
        return self.config.train.layout.etp if rule.is_expert else self.config.train.layout.tp


@pytest.fixture(scope="module", params=[RECIPES[0], *(pytest.param(name, marks=pytest.mark.matrix(name)) for name in RECIPES[1:])])
def case(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("survey")
    config = load([f"recipe={request.param}", f"output_dir={directory}"])
    hf = published_config(config.model.published)
    run_ranks(survey, min(2, config.train.layout.pp), hf, config.train, config.model.max_context, directory, deadline_seconds=300)
    found, shapes, holders = read_survey(directory), {}, {}
    for place, num_ranks in Counter(found.places.values()).items():
        for name, shape in found.held[place].items():
            shapes.setdefault(name, set()).add(shape)
            shard = place.expert_tensor if FAMILIES[hf["model_type"]].find(name)[0].is_expert else place.tensor
            holders.setdefault(name, Counter())[place.stage, shard] += num_ranks
    return Case(config=config, hf=hf, found=found, shapes=shapes, holders=holders)


def test_every_tensor_is_on_all_ranks_that_must_hold_it_and_on_no_other(case):
    layout = case.config.train.layout
    assert len(case.found.places) == layout.ranks
    for name, found in case.holders.items():
        rule, _ = case.family.find(name)
        copies = layout.edp if rule.is_expert else layout.dp * layout.cp
        stages = sorted({stage for stage, _ in found})
        assert found == {(stage, shard): copies for stage in stages for shard in range(case.num_shards(rule))}, name
        # The layers of multi-token prediction embed the tokens a second time, on the last stage.
        twice = case.config.train.mtp_loss > 0 and name == "embedding.word_embeddings.weight"
        assert stages == [0, layout.pp - 1] if twice else len(stages) == 1, name


def test_what_all_ranks_hold_is_the_published_checkpoint(case):
    shapes = {}
    for name, (shape,) in case.shapes.items():
        for hf_name, whole in _whole(case, name, shape):
            assert hf_name not in shapes, f"{hf_name} comes from two parameters"
            shapes[hf_name] = whole
    expected = published_tensors(case.hf)
    assert sorted(shapes.keys() - expected.keys()) == []
    assert sorted(expected.keys() - shapes.keys()) == []
    assert {name: (shape, expected[name]) for name, shape in shapes.items() if shape != expected[name]} == {}
    assert sum(prod(shape) for shape in shapes.values()) == PUBLISHED_COUNTS[case.config.model.published]


def test_the_shards_of_every_tensor_tile_it(case):
    kinds = {(rule, shape, case.num_shards(rule)) for name, (shape,) in case.shapes.items() for rule, _ in [case.family.find(name)]}
    for rule, shape, num_shards in kinds:
        _check_tiles(rule, shape, num_shards, case.found.sizes)


def test_a_plan_knows_who_holds_what_and_loads_no_card_more_than_it_must(case):
    layout, experts = case.config.train.layout, case.num_experts
    rollout = RolloutLayout(num_servers=4, gpus_per_server=32, gpus_per_node=8)
    tensors = [tensor for name, (shape,) in case.shapes.items() for tensor in _planned(case, name, shape)]
    plan = plan_transfers(tensors, layout, rollout, num_experts=experts, part_bytes=2**25)
    assert faults(plan, experts) == []
    of_experts = sum(tensor.num_bytes for tensor in tensors if tensor.expert is not None)
    others = sum(tensor.num_bytes for tensor in tensors) - of_experts
    assert plan.received().max() <= 1.05 * (of_experts / rollout.gpus_per_server + others / rollout.gpus_per_node)
    found = deliveries(plan, bucket_bytes=2**28, by_node=True)
    buckets, busiest = in_order(found.jobs), bound_seconds(plan, bytes_per_second=1.0)
    assert seconds(buckets, bytes_per_second=1.0) <= 1.1 * busiest
    sizes = {spec.name: num_bytes(spec) for spec in found.tensors}
    # The embedding and the output layer, which vLLM wants whole as it does all others, and two batches; a third begins before those end
    # where tensor parallelism cuts what is no expert too.
    assert incomplete_bytes(buckets, sizes) <= 2 * max(sizes.values()) + (2 if layout.tp == 1 else 3) * 2**29
    for tensor in tensors[:: len(tensors) // 200]:
        for shard in range(case.num_shards_of(tensor)):
            expected = {rank for rank, place in case.found.places.items() if _has(place, tensor, shard, layout, experts)}
            assert set(holders(tensor, shard, layout, experts)) == expected, tensor.name


def test_it_takes_no_memory(case):
    """The models have 470 GB to 2 TB."""
    assert case.found.peak_bytes < 2 * 2**30


def test_every_model_of_experts_with_a_published_config_is_built():
    covered = {load([f"recipe={recipe}"]).model.published for recipe in RECIPES}
    with_experts = {name for name in published_names() if "num_experts_per_tok" in published_config(name)}
    assert covered == with_experts and set(PUBLISHED_COUNTS) == set(published_names())


def _whole(case: Case, name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """(Hugging Face name, shape) of every tensor that a parameter becomes, its copies in the layers after the last among them."""
    rule, numbers = case.family.find(name)
    sizes = case.found.sizes
    merged = _merged(rule, shape, case.num_shards(rule), sizes)
    names = hf_names(rule, numbers, num_layers=sizes.num_layers, tied=case.hf["tie_word_embeddings"])
    layers = range(sizes.num_layers, sizes.num_layers + case.hf.get("num_nextn_predict_layers", 0))
    copies = [copy.format(mtp=layer) for copy in rule.copies for layer in layers]
    return list(zip(names + copies, merged + merged[:1] * len(copies), strict=True))


@cache
def _merged(rule: Rule, shape: tuple[int, ...], num_shards: int, sizes: Sizes) -> list[tuple[int, ...]]:
    shards = [torch.empty(shape, device="meta")] * num_shards
    return [tuple(tensor.shape) for tensor in merge(rule, shards, sizes=sizes)]


def _planned(case: Case, name: str, shape: tuple[int, ...]) -> list[PlannedTensor]:
    rule, numbers = case.family.find(name)
    if rule.is_mtp:
        return []
    stage = min(stage for stage, _ in case.holders[name])
    return [
        PlannedTensor(
            spec=TensorSpec(name=hf_name, shape=whole, dtype="bfloat16"),
            stage=stage,
            expert=numbers.get("expert"),
            cut_dim=cut_dim(rule),
        )
        for hf_name, whole in _whole(case, name, shape)[: len(rule.hf)]
    ]


def _has(place: Place, tensor: PlannedTensor, shard: int, layout: Layout, num_experts: int) -> bool:
    """By Megatron's own groups."""
    if place.stage != tensor.stage:
        return False
    if tensor.expert is None:
        return tensor.cut_dim is None or place.tensor == shard
    return place.expert == tensor.expert // (num_experts // layout.ep) and place.expert_tensor == shard


def _check_tiles(rule: Rule, shape: tuple[int, ...], num_shards: int, sizes: Sizes) -> None:
    """Every row (or column) of the whole tensors, numbered through, is in exactly one shard, and the shards are as large as those held."""
    dim = 1 if rule.shard == "row" else 0
    whole = merge(rule, [torch.empty(shape, device="meta")] * num_shards, sizes=sizes)
    lengths = [tensor.shape[dim] for tensor in whole]
    numbers = torch.arange(1, sum(lengths) + 1).split(lengths)  # 0 is padding
    tensors = [part.unsqueeze(0) if rule.shard == "row" else part for part in numbers]
    shards = [split(rule, tensors, rank=rank, num_ranks=num_shards, sizes=sizes).flatten() for rank in range(num_shards)]
    assert {len(shard) for shard in shards} == {shape[dim]}, rule.megatron
    if rule.shard == "replicated":
        assert all(shard.equal(tensors[0]) for shard in shards)
    else:
        tiled = torch.cat(shards)
        assert tiled[tiled > 0].sort().values.equal(torch.cat(numbers)), rule.megatron
    assert all(part.flatten().equal(number) for part, number in zip(merge(rule, _like(rule, shards), sizes=sizes), numbers, strict=True))


def _like(rule: Rule, shards: list[torch.Tensor]) -> list[torch.Tensor]:
    return [shard.unsqueeze(0) for shard in shards] if rule.shard == "row" else shards
