"""The ratio of attention to everything else is that of the operations a transformers model runs."""

import pytest
import torch
from deepseek_cases import require_megatron_for, write_deepseek
from engine_cases import settings
from engine_jobs import attention_tokens_of
from engine_ranks import run_ranks
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from moerl.config.schema.layout import Layout


@pytest.fixture(scope="module")
def all_checkpoints(checkpoints, tmp_path_factory):
    deepseek = write_deepseek(tmp_path_factory.mktemp("deepseek"), "plain", "yarn-unscaled", "odd")
    return checkpoints | {f"deepseek-{name}": directory for name, directory in deepseek.items()}


def operations(model, length):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.arange(length)[None])
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "name", ["qwen3", "qwen3_moe", "untied-qwen3", "untied-qwen3_moe", "deepseek-plain", "deepseek-yarn-unscaled", "deepseek-odd"]
)
def test_attention_costs_as_much_as_the_rest_at_that_length(name, all_checkpoints):
    if name.startswith("deepseek"):
        require_megatron_for(all_checkpoints[name])
    model = AutoModelForCausalLM.from_pretrained(all_checkpoints[name], attn_implementation="eager", experts_implementation="eager")
    # operations(length) = linear * length + attention * length ** 2, of which the causal half counts.
    short, long = operations(model, 8), operations(model, 16)
    attention = (long - 2 * short) / (16**2 - 2 * 8**2)
    linear = short / 8 - attention * 8
    expected = linear / (attention / 2)
    assert run_ranks(attention_tokens_of, 1, settings(all_checkpoints[name], Layout())) == pytest.approx(expected, rel=0.01)
    if name == "qwen3_moe":
        assert run_ranks(attention_tokens_of, 2, settings(all_checkpoints[name], Layout(ranks=2, tp=2))) == pytest.approx(
            expected, rel=0.01
        )
