"""The shipped layouts of the largest models: what all ranks hold together is the published checkpoint, no more and no less.

Every rank of every layout is built by Megatron for real, on meta tensors (scale_ranks.py).
"""

from collections import Counter
from math import prod

import pytest
import torch
from engine_ranks import run_ranks
from published_tensors import PUBLISHED_COUNTS, published_tensors
from scale_ranks import Held, survey

from moerl.config.load import load
from moerl.config.published import published_config, published_names
from moerl.models import FAMILIES
from moerl.models.family import Family, Rule, Sizes
from moerl.models.owned import hf_names
from moerl.models.shards import merge, split

RECIPES = [
    "grpo-deepseek-v3-32n8g-sync",
    "grpo-qwen3-235b-16n8g-sync",
    "grpo-qwen3-235b-32n8g-sync",
    "grpo-kimi-k2-32n8g-sync",
    "grpo-glm-4.5-8n8g-sync",
]


@pytest.fixture(scope="module", params=RECIPES)
def surveyed(request, tmp_path_factory):
    """(recipe, its config.json, what all its ranks hold)"""
    config = load([f"recipe={request.param}", f"output_dir={tmp_path_factory.mktemp('runs')}"])
    hf = published_config(config.model.published)
    return config, hf, run_ranks(survey, 1, hf, config.train, config.model.max_context, deadline_seconds=300)


def test_every_tensor_is_on_all_ranks_that_must_hold_it_and_on_no_other(surveyed):
    config, hf, found = surveyed
    layout, family = config.train.layout, FAMILIES[hf["model_type"]]
    for name, holders in found.holders.items():
        rule, _ = family.find(name)
        num_shards, copies = (layout.etp, layout.edp) if rule.is_expert else (layout.tp, layout.dp * layout.cp)
        assert len({held.shape for held in holders}) == 1, name
        stages = {held.stage for held in holders}
        assert Counter((held.stage, held.shard) for held in holders) == {
            (stage, shard): copies for stage in stages for shard in range(num_shards)
        }, name
        # The layers of multi-token prediction embed the tokens a second time, on the last stage.
        twice = config.train.mtp_loss > 0 and name == "embedding.word_embeddings.weight"
        assert stages == {0, layout.pp - 1} if twice else len(stages) == 1, name


def test_what_all_ranks_hold_is_the_published_checkpoint(surveyed):
    config, hf, found = surveyed
    family, shapes = FAMILIES[hf["model_type"]], {}
    for name, holders in found.holders.items():
        for hf_name, shape in _whole(family, name, holders, hf, found.sizes):
            assert hf_name not in shapes, f"{hf_name} comes from two parameters"
            shapes[hf_name] = shape
    expected = published_tensors(hf)
    assert sorted(shapes.keys() - expected.keys()) == []
    assert sorted(expected.keys() - shapes.keys()) == []
    assert {name: (shape, expected[name]) for name, shape in shapes.items() if shape != expected[name]} == {}
    assert sum(prod(shape) for shape in shapes.values()) == PUBLISHED_COUNTS[config.model.published]


def test_the_shards_of_every_tensor_tile_it(surveyed):
    config, hf, found = surveyed
    family, layout, seen = FAMILIES[hf["model_type"]], config.train.layout, set()
    for name, holders in found.holders.items():
        rule, _ = family.find(name)
        key = (rule.megatron, holders[0].shape)
        if key not in seen:
            seen.add(key)
            _check_tiles(rule, holders[0].shape, layout.etp if rule.is_expert else layout.tp, found.sizes)


def test_no_rank_takes_memory_for_it(surveyed):
    assert surveyed[2].peak_bytes < 2 * 2**30


def test_every_model_with_a_published_config_is_built():
    covered = {load([f"recipe={recipe}"]).model.published for recipe in RECIPES}
    assert covered == set(published_names()) == set(PUBLISHED_COUNTS)


def _whole(family: Family, name: str, holders: list[Held], hf: dict, sizes: Sizes) -> list[tuple[str, tuple[int, ...]]]:
    """(Hugging Face name, shape) of every tensor that a parameter becomes, its copies in the layers after the last among them."""
    rule, numbers = family.find(name)
    shards = {held.shard: torch.empty(held.shape, device="meta") for held in holders}
    merged = merge(rule, [shards[shard] for shard in sorted(shards)], sizes=sizes)
    names = hf_names(rule, numbers, num_layers=sizes.num_layers, tied=hf["tie_word_embeddings"])
    layers = range(sizes.num_layers, sizes.num_layers + hf.get("num_nextn_predict_layers", 0))
    copies = [copy.format(mtp=layer) for copy in rule.copies for layer in layers]
    merged += merged[:1] * len(copies)
    return [(hf_name, tuple(tensor.shape)) for hf_name, tensor in zip(names + copies, merged, strict=True)]


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
