"""Parallel sizes: what follows from them, and that a layout without problems divides everything it cuts."""

import re
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from moerl.config.derive.model_shape import ModelShape
from moerl.config.rules.parallel_rules import broken_layout, contradictions, pipeline_problems
from moerl.config.schema.layout import Layout

sizes = st.sampled_from([1, 2, 3, 4, 8])
layouts = st.builds(Layout, ranks=st.integers(1, 64), tp=sizes, pp=sizes, vpp=st.sampled_from([1, 2]), cp=sizes, ep=sizes, etp=sizes)
shapes = st.builds(
    ModelShape,
    model_type=st.just("qwen3_moe"),
    num_layers=st.integers(1, 32),
    num_heads=st.sampled_from([4, 8, 12]),
    num_kv_heads=st.sampled_from([1, 2, 4]),
    max_positions=st.just(64),
    num_experts=st.one_of(st.none(), st.sampled_from([4, 8, 12])),
    expert_ffn_size=st.sampled_from([8, 12]),
    dense_ffn_size=st.sampled_from([0, 8, 12]),
    shared_ffn_size=st.sampled_from([0, 8, 12]),
)


def accepted(layout: Layout, shape: ModelShape | None) -> bool:
    return not list(broken_layout(layout, shape))


@given(layouts)
def test_dp_and_edp_cover_the_world_exactly_when_the_sizes_are_accepted(layout: Layout):
    covers = (
        layout.dp * layout.tp * layout.pp * layout.cp == layout.ranks and layout.edp * layout.ep * layout.etp * layout.pp == layout.ranks
    )
    assert accepted(layout, None) == (covers and not (layout.vpp > 1 and layout.pp == 1))


@given(layouts, shapes)
def test_an_accepted_layout_cuts_the_model_into_whole_parts(layout: Layout, shape: ModelShape):
    if not accepted(layout, shape):
        return
    assert shape.num_heads % layout.tp == shape.num_kv_heads % layout.tp == 0
    assert shape.dense_ffn_size % layout.tp == shape.shared_ffn_size % layout.tp == 0
    if shape.num_experts is None:
        assert layout.ep == layout.etp == 1
    else:
        assert shape.num_experts % layout.ep == shape.expert_ffn_size % layout.etp == 0


@given(layouts, shapes)
def test_every_problem_names_a_field_of_the_layout_and_its_value(layout: Layout, shape: ModelShape):
    for problem in broken_layout(layout, shape):
        assert problem.value == getattr(layout, problem.path.removeprefix("train.layout."))
        assert problem.fix


@given(layouts)
def test_padded_tokens_divide_over_sequence_and_context_parallel_ranks(layout: Layout):
    assert layout.token_multiple % layout.tp == 0
    if layout.cp > 1:
        assert layout.token_multiple % (2 * layout.cp) == 0


@given(
    st.builds(
        Layout,
        ranks=st.integers(1, 24),
        pp=sizes,
        vpp=st.sampled_from([1, 2, 3]),
        embedding_as_layer=st.booleans(),
        loss_as_layer=st.booleans(),
    ),
    st.integers(1, 32),
)
def test_every_cut_that_is_proposed_instead_of_an_uneven_one_can_be_made(layout: Layout, num_layers: int):
    fixes = [problem.fix for problem in pipeline_problems(layout, num_layers) if problem.fix.startswith("one of: ")]
    for option in (option for fix in fixes for option in fix.removeprefix("one of: ").split("; ") if not option.startswith("fewer chunks")):
        found = {name: {"true": True, "false": False}.get(value, value) for name, value in re.findall(r"(\w+)=(\w+)", option)}
        counted = {"embedding_as_layer": False, "loss_as_layer": False} if "without" in option else {}
        changed = replace(layout, **counted, **{name: value if isinstance(value, bool) else int(value) for name, value in found.items()})
        assert changed != layout and not [*contradictions(changed), *pipeline_problems(changed, num_layers)], option
