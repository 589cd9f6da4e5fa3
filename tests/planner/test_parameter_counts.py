"""Parameters that the planner counts, held against modules and buffers that Megatron builds: every one, in every family."""

import engine_cases
import pytest
from engine_ranks import run_ranks
from family_cases import _DECODER, BUILT, CASES
from planned_jobs import built_sizes

from moerl.config.derive.model_configs import published_config
from moerl.config.load import load
from moerl.config.schema.layout import Layout
from moerl.config.schema.train_config import OptimizerConfig, TrainConfig
from moerl.models.families.family_table import FAMILIES
from moerl.models.families.parts.config_fields import num_mtp_layers
from moerl.planner.parameter_counts import model_parameters, rank_parameters

NAMES = ("dp2", "tp2-etp2", "cp2", "pp2", "pp2-first3", "pp2-vpp2", "ep2", "tp2-ep2-etp2-dp2", "tp2-pp2-ep2-dp2")
LAYOUTS = {"one": Layout(), "tp2-dp3": Layout(ranks=6, tp=2)} | {name: engine_cases.LAYOUTS[name] for name in NAMES}
RECIPES = ("grpo-deepseek-v3-32n8g-sync", "grpo-qwen3-235b-16n8g-sync", "grpo-kimi-k2-32n8g-sync", "grpo-glm-4.5-8n8g-sync")


def cases_of_families():
    for name in BUILT:
        hf = _DECODER | CASES[name]
        fields = FAMILIES[hf["model_type"]].transformer_config(hf)
        for layout_name, layout in LAYOUTS.items():
            if layout.ep > 1 and fields.get("num_moe_experts") is None:
                continue
            if layout.tp > 1 and "linear_attention_freq" in fields:
                continue  # gated delta nets are not cut
            if layout.etp > 1 and fields["add_bias_linear"]:
                continue  # Megatron has no biased experts that are cut
            mtp_loss = 0.1 if num_mtp_layers(hf) and layout.vpp == 1 else 0.0
            exchange = {"cp_comm_type": "all_gather"} if fields.get("experimental_attention_variant") == "dsa" else {}
            train = TrainConfig(optimizer=OptimizerConfig(lr=1e-3), layout=layout, mtp_loss=mtp_loss, megatron=exchange)
            yield f"{name} {layout_name}", (hf, train, tuple(range(layout.pp)))


def cases_of_recipes():
    for name in RECIPES:
        config = load([f"recipe={name}"])
        last = config.train.layout.pp - 1
        yield name, (published_config(config.model.published), config.train, (0, last // 2, last))


def counted(hf, train, stages):
    planned = rank_parameters(hf, train)
    return {
        (stage, number): (sorted(chunk.dense + chunk.experts + chunk.frozen), chunk.buffer, chunk.shard)
        for stage in stages
        for number, chunk in enumerate(planned[stage])
    }


@pytest.mark.parametrize("cases", [cases_of_families, cases_of_recipes])
def test_parameters_buffers_and_shards_are_those_that_megatron_builds(cases):
    names, of = zip(*cases(), strict=True)
    built = run_ranks(built_sizes, 1, of)
    assert {name: found for name, found, case in zip(names, built, of, strict=True) if found != counted(*case)} == {}


@pytest.mark.parametrize(
    ("name", "billions"), [("deepseek-v3", 671.03), ("qwen3-235b-a22b", 235.09), ("kimi-k2", 1026.4), ("glm-4.5", 352.8)]
)
def test_a_model_has_the_parameters_that_its_publisher_says(name, billions):
    """DeepSeek-V3: 653.91 billion of experts and 17.12 of the rest; layers of multi-token prediction come on top."""
    assert sum(model_parameters(published_config(name))) / 1e9 == pytest.approx(billions, abs=0.05)
