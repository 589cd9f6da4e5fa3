"""A push from real training workers: each sends its own pieces, and together they are the export.

Every family: tests/train/test_families.py.
"""

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
def test_a_run_plans_with_the_tensors_that_moerl_plan_prints(model, layout, tmp_path):
    of_run, of_plan = run_ranks(push_ranks.outlines, 4, deepseek_settings(model, layout, dtype="bfloat16"), tmp_path / "store")
    assert len(of_run) > 50
    assert of_run == of_plan
