"""Every accepted cut of a model into pipeline chunks is the one Megatron makes, and every proposed one is accepted."""

import re
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import megatron_patches
from moerl.config.derive.pipeline import chunk_layers, stage_layers
from moerl.config.rules.parallel_rules import contradictions, pipeline_problems
from moerl.config.schema.layout import Layout

stages = st.one_of(st.none(), st.integers(1, 12))
cuts = st.builds(
    Layout,
    ranks=st.just(48),
    pp=st.sampled_from([1, 2, 3, 4, 8, 16]),
    vpp=st.sampled_from([1, 2, 3]),
    first_stage_layers=stages,
    last_stage_layers=stages,
    embedding_as_layer=st.booleans(),
    loss_as_layer=st.booleans(),
)


def accepted(layout, num_layers):
    return not [*contradictions(layout), *pipeline_problems(layout, num_layers)]


@cache
def layers_to_build():
    megatron_patches.activate()  # before the import, for tests of this process that need them
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    return get_num_layers_to_build


def megatron_layers(layout, num_layers, stage, chunk):
    config = SimpleNamespace(
        num_layers=num_layers,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        num_layers_in_first_pipeline_stage=layout.first_stage_layers,
        num_layers_in_last_pipeline_stage=layout.last_stage_layers,
        account_for_embedding_in_pipeline_split=layout.embedding_as_layer,
        account_for_loss_in_pipeline_split=layout.loss_as_layer,
        pipeline_model_parallel_layout=None,
    )
    return layers_to_build()(config, vp_stage=chunk if layout.vpp > 1 else None, pp_rank=stage)


@given(cuts, st.integers(1, 40))
def test_an_accepted_cut_is_megatrons_and_gives_every_chunk_a_layer(layout, num_layers):
    if not accepted(layout, num_layers):
        return
    chunks = chunk_layers(layout, num_layers)
    assert sum(map(sum, chunks)) == num_layers
    assert min(map(min, chunks)) >= 1
    assert chunks == [[megatron_layers(layout, num_layers, stage, chunk) for chunk in range(layout.vpp)] for stage in range(layout.pp)]


@given(cuts, st.integers(1, 40))
def test_a_proposed_cut_is_accepted(layout, num_layers):
    for problem in pipeline_problems(layout, num_layers):
        for first, last in re.findall(r"first_stage_layers=(\d+) and last_stage_layers=(\d+)", problem.fix):
            proposed = replace(
                layout, first_stage_layers=int(first), last_stage_layers=int(last), embedding_as_layer=False, loss_as_layer=False
            )
            assert accepted(proposed, num_layers), problem
        for size in re.findall(r"pp=(\d+)", problem.fix) if problem.fix.startswith("one of") else []:
            proposed = replace(layout, pp=int(size), embedding_as_layer=False, loss_as_layer=False)
            assert accepted(proposed, num_layers), problem


@pytest.mark.parametrize(
    ("num_layers", "layout", "sizes"),
    [
        (61, Layout(ranks=16, pp=16, first_stage_layers=3, last_stage_layers=2), [3, *[4] * 14, 2]),
        (61, Layout(ranks=4, pp=4, last_stage_layers=13), [16, 16, 16, 13]),
        (94, Layout(ranks=8, pp=8, first_stage_layers=11, last_stage_layers=11), [11, *[12] * 6, 11]),
        (78, Layout(ranks=4, pp=4, last_stage_layers=18), [20, 20, 20, 18]),
    ],
)
def test_published_layouts_are_accepted(num_layers, layout, sizes):
    assert accepted(layout, num_layers)
    assert stage_layers(layout, num_layers) == sizes


def test_embedding_and_loss_take_the_place_of_a_layer_each():
    layout = Layout(ranks=8, pp=8, vpp=6, embedding_as_layer=True, loss_as_layer=True)
    assert accepted(layout, 94)
    assert chunk_layers(layout, 94) == [[1, 2, 2, 2, 2, 2], *[[2] * 6] * 6, [2, 2, 2, 2, 2, 1]]


def test_a_deepseek_that_no_pipeline_divides_gets_a_cut_that_works():
    [problem] = pipeline_problems(Layout(ranks=16, pp=16), 61)
    assert "first_stage_layers=3 and last_stage_layers=2 (4 each between)" in problem.fix
