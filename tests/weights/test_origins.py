"""What the owners of tensors say of them before a push."""

import fault_jobs
import pytest
from deepseek_cases import deepseek_settings, write_deepseek
from engine_ranks import run_ranks

from moerl.config.layout import Layout


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_deepseek(tmp_path_factory.mktemp("origins"), "plain")["plain"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_owners_digest_what_the_export_gives_and_name_every_rank_with_a_shard(model, dtype):
    settings = deepseek_settings(model, Layout(ranks=4, tp=2, ep=2, etp=2), dtype=dtype)
    origins, exported = run_ranks(fault_jobs.origins_and_exported_digests, 4, settings)
    assert {name: origin.digest for name, origin in origins.items()} == exported
    ranks = {name: origin.ranks for name, origin in origins.items()}
    assert ranks["model.layers.2.mlp.experts.1.up_proj.weight"] == (0, 1)
    assert ranks["model.layers.2.mlp.experts.6.up_proj.weight"] == (2, 3)
    assert ranks["model.layers.2.self_attn.o_proj.weight"] == (0, 1)
    assert ranks["model.layers.2.mlp.gate.e_score_correction_bias"] == (0,)


def test_a_stage_s_tensors_are_of_its_rank(model):
    origins, exported = run_ranks(fault_jobs.origins_and_exported_digests, 2, deepseek_settings(model, Layout(ranks=2, pp=2)))
    assert {name: origin.digest for name, origin in origins.items()} == exported
    assert origins["model.layers.0.input_layernorm.weight"].ranks == (0,)
    assert origins["lm_head.weight"].ranks == (1,)
