"""A push from real training workers: each sends its own pieces, and together they are the export.

Every family: tests/train/test_families.py.
"""

import dataclasses

import push_ranks
import pytest
from deepseek_cases import deepseek_settings, write_deepseek
from engine_ranks import run_ranks

from moerl.config.schema.layout import Layout


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_deepseek(tmp_path_factory.mktemp("owners"), "plain")["plain"]


TP_EP = Layout(ranks=4, tp=2, ep=2, etp=2)


@pytest.mark.parametrize(("layout", "dtype"), [(TP_EP, "float32"), (TP_EP, "bfloat16"), (Layout(ranks=4, pp=2, ep=2), "float32")])
def test_what_all_ranks_send_is_what_an_export_gives(model, layout, dtype):
    settings = deepseek_settings(model, layout, dtype=dtype)
    pushed, exported, senders, num_buckets = run_ranks(push_ranks.pushed_and_exported, layout.ranks, settings)
    assert pushed == exported
    assert num_buckets > 2 * layout.ranks
    first, last = (f"model.layers.2.mlp.experts.{expert}.up_proj.weight" for expert in (1, 6))
    assert (senders[first], senders[last]) == (({0, 1}, {2, 3}) if layout.pp == 1 else ({2}, {3}))
    if layout.tp == 2:
        assert {rank % 2 for rank in senders["model.layers.2.self_attn.o_proj.weight"]} == {0, 1}
    assert set().union(*senders.values()) == set(range(layout.ranks))


@pytest.mark.parametrize("layout", [TP_EP, Layout(ranks=4, pp=2, ep=2)])
def test_a_run_plans_with_the_tensors_that_moerl_plan_prints(model, layout):
    of_run, of_plan = run_ranks(push_ranks.outlines, 4, deepseek_settings(model, layout, dtype="bfloat16"))
    assert len(of_run) > 50
    assert of_run == of_plan


@pytest.mark.parametrize("layout", [TP_EP, pytest.param(Layout(ranks=4, pp=2, ep=2), marks=pytest.mark.matrix)])
def test_trained_layers_of_multi_token_prediction_are_pushed_where_servers_draft(model, layout):
    """Without the copies of the embedding and the output layer that a checkpoint has there: engines share those of the model."""
    settings = dataclasses.replace(deepseek_settings(model, layout, mtp_loss=0.1, dtype="float32"), pushes_mtp=True)
    pushed, exported, senders, _ = run_ranks(push_ranks.pushed_and_exported, 4, settings)
    copies = {name for name in exported if name.startswith("model.layers.") and name.endswith(("embed_tokens.weight", "head.weight"))}
    assert len(copies) == 4 and pushed == {name: digest for name, digest in exported.items() if name not in copies}
    drafting = {name for name in pushed if name.startswith(("model.layers.4.", "model.layers.5."))}
    assert len([name for name in drafting if ".experts." in name]) > 20 and {name for name in drafting if name.endswith("eh_proj.weight")}
    last_stage = {2, 3} if layout.pp == 2 else {0, 1, 2, 3}
    assert set().union(*(senders[name] for name in drafting)) == last_stage
    of_run, of_plan = run_ranks(push_ranks.outlines, 4, settings)
    assert of_run == of_plan
