"""Splitting a parameter over tensor-parallel ranks and merging it again, without Megatron."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moerl.models.families.family_table import FAMILIES
from moerl.models.families.parts.family import Rule
from moerl.models.shards import Sizes, cut_dim, join, merge, own_range, split

RANKS = st.sampled_from([1, 2, 4])
SMALL = st.integers(1, 5)


def rule(shard, hf=("a",)):
    return Rule(megatron="decoder.x.weight", hf=hf, shard=shard)


def numbered(*shape, start=0):
    """Every element is another number, so that no permutation goes unseen."""
    count = torch.Size(shape).numel()
    return torch.arange(start, start + count, dtype=torch.float32).reshape(shape)


def sizes(*, groups=1, head_dim=1, vocab=1, padded=1):
    return Sizes(num_layers=4, num_query_groups=groups, head_dim=head_dim, vocab_size=vocab, padded_vocab_size=padded)


def own_part(one, tensor, rank, num_ranks, facts):
    if (dim := cut_dim(one)) is None:
        return tensor
    return tensor.movedim(dim, 0)[own_range(one, tensor.shape[dim], rank=rank, num_ranks=num_ranks, sizes=facts)].movedim(0, dim)


def shards_of(one, tensors, num_ranks, facts):
    shards = [split(one, tensors, rank=rank, num_ranks=num_ranks, sizes=facts) for rank in range(num_ranks)]
    assert len({shard.shape for shard in shards}) == 1
    for rank, shard in enumerate(shards):
        parts = [own_part(one, tensor, rank, num_ranks, facts) for tensor in tensors]
        assert join(one, parts, num_ranks=num_ranks, sizes=facts).equal(shard)
    merged = merge(one, shards, sizes=facts)
    assert len(merged) == len(tensors) == len(one.hf)
    for tensor, original in zip(merged, tensors, strict=True):
        assert tensor.equal(original)
    return shards


@given(num_ranks=RANKS, size=SMALL)
def test_a_replicated_parameter_is_whole_on_every_rank(num_ranks, size):
    whole = numbered(size)
    assert all(shard.equal(whole) for shard in shards_of(rule("replicated"), [whole], num_ranks, sizes()))


@given(num_ranks=RANKS, rows=SMALL, columns=SMALL)
def test_column_parallel_ranks_hold_consecutive_rows(num_ranks, rows, columns):
    whole = numbered(rows * num_ranks, columns)
    for rank, shard in enumerate(shards_of(rule("column"), [whole], num_ranks, sizes())):
        assert shard.equal(whole[rank * rows : (rank + 1) * rows])


@given(num_ranks=RANKS, rows=SMALL, columns=SMALL)
def test_row_parallel_ranks_hold_consecutive_columns(num_ranks, rows, columns):
    whole = numbered(rows, columns * num_ranks)
    for rank, shard in enumerate(shards_of(rule("row"), [whole], num_ranks, sizes())):
        assert shard.equal(whole[:, rank * columns : (rank + 1) * columns])


@given(num_ranks=RANKS, vocab=st.integers(1, 40), columns=SMALL)
def test_a_vocabulary_is_padded_with_zeros_at_its_end(num_ranks, vocab, columns):
    padded = -(-vocab // num_ranks) * num_ranks
    whole = numbered(vocab, columns)
    shards = shards_of(rule("vocab"), [whole], num_ranks, sizes(vocab=vocab, padded=padded))
    joined = torch.cat(shards)
    assert joined.shape == (padded, columns)
    assert not joined[vocab:].any()


@given(num_ranks=RANKS, inner=SMALL, columns=SMALL)
def test_gate_and_up_are_cut_separately_so_that_a_rank_can_multiply_its_halves(num_ranks, inner, columns):
    gate, up = numbered(inner * num_ranks, columns), numbered(inner * num_ranks, columns, start=1000)
    for rank, shard in enumerate(shards_of(rule("gate_up", ("gate", "up")), [gate, up], num_ranks, sizes())):
        mine = slice(rank * inner, (rank + 1) * inner)
        assert shard.equal(torch.cat([gate[mine], up[mine]]))


@given(num_ranks=RANKS, inner=SMALL, columns=SMALL)
def test_alternating_gates_and_ups_become_a_rank_s_gates_and_then_its_ups(num_ranks, inner, columns):
    gate, up = numbered(inner * num_ranks, columns), numbered(inner * num_ranks, columns, start=1000)
    alternating = torch.stack([gate, up], dim=1).flatten(0, 1)
    expected = shards_of(rule("gate_up", ("gate", "up")), [gate, up], num_ranks, sizes())
    for kind, stored in (("alternating", alternating), ("alternating_columns", alternating.T)):
        found = shards_of(rule(kind), [stored], num_ranks, sizes())
        assert all(one.equal(other) for one, other in zip(found, expected, strict=True))


@given(num_ranks=RANKS, rows=SMALL, columns=SMALL)
def test_a_transposed_row_parallel_weight_is_cut_like_one_that_is_not(num_ranks, rows, columns):
    whole = numbered(rows, columns * num_ranks)
    found = shards_of(rule("transposed_row"), [whole.T], num_ranks, sizes())
    assert all(one.equal(other) for one, other in zip(found, shards_of(rule("row"), [whole], num_ranks, sizes()), strict=True))


@given(num_ranks=RANKS, groups_per_rank=st.integers(1, 3), queries=st.integers(1, 4), head_dim=SMALL, columns=SMALL)
def test_every_query_group_lies_with_its_key_and_value(num_ranks, groups_per_rank, queries, head_dim, columns):
    """Megatron's order, spelled out: the queries of a group, its key, its value, then the next group."""
    groups = groups_per_rank * num_ranks
    q = numbered(groups * queries * head_dim, columns)
    k, v = numbered(groups * head_dim, columns, start=10_000), numbered(groups * head_dim, columns, start=20_000)
    facts = sizes(groups=groups, head_dim=head_dim)
    shards = shards_of(rule("qkv", ("q", "k", "v")), [q, k, v], num_ranks, facts)
    for rank, shard in enumerate(shards):
        expected = []
        for group in range(rank * groups_per_rank, (rank + 1) * groups_per_rank):
            expected.append(q[group * queries * head_dim : (group + 1) * queries * head_dim])
            expected.extend(tensor[group * head_dim : (group + 1) * head_dim] for tensor in (k, v))
        assert shard.equal(torch.cat(expected))


@given(groups=st.sampled_from([2, 4]), queries=st.integers(1, 3), head_dim=SMALL)
def test_a_bias_of_queries_keys_and_values_is_cut_like_their_weight(groups, queries, head_dim):
    q, k, v = numbered(groups * queries * head_dim), numbered(groups * head_dim, start=100), numbered(groups * head_dim, start=200)
    shards_of(rule("qkv", ("q", "k", "v")), [q, k, v], 2, sizes(groups=groups, head_dim=head_dim))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_rule_is_found_by_the_names_it_makes_and_by_no_others(family):
    rules = FAMILIES[family].rules
    for one in rules:
        name = one.megatron.format(layer=11, expert=7, mtp=1)
        found, numbers = FAMILIES[family].find(name)
        assert found is one
        assert numbers == {key: value for key, value in (("layer", 11), ("expert", 7), ("mtp", 1)) if f"{{{key}}}" in one.megatron}
    # The norm before a dense MLP is part of its first matrix, the norm before experts is not; that before a delta net is part of it as that
    # before attention: a layer has one of them.
    others = ("pre_mlp_layernorm.weight", "in_proj.layer_norm_weight")
    names = [name for one in rules for name in (*one.hf, *one.copies) if not one.megatron.endswith(others)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "name", ["decoder.layers.0.self_attention.linear_qkv.bias", "decoder.layers.x.mlp.router.weight", "output_layerXweight"]
)
def test_a_parameter_without_a_rule_is_named(name):
    with pytest.raises(KeyError, match=name):
        FAMILIES["qwen3_moe"].find(name)
