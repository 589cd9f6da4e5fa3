"""`moerl plan` of a push: the transport that the run will take, and no figure for one that it will not."""

from dataclasses import replace

import pytest

from moerl.check import load_checked
from moerl.config.derive.model_configs import model_config, published_config
from moerl.config.load import load
from moerl.planner.node_memory import largest_tensors
from moerl.planner.parameter_counts import model_parameters
from moerl.planner.push_plan import plan_push, rollout_of, route_of

SEPARATE, SHARED, TINY = "grpo-qwen3-235b-32n8g-async", "grpo-qwen3-235b-16n8g-sync", "grpo-tiny-moe-1n2g-sync"
HALF_SHARED = (
    "placement.mode=group_colocated",
    "placement.num_shared=2",
    "placement.nodes=24",
    "max_staleness=1",
    "train.old_logprobs=rollout",
)
ON_TWO_NODES = ("placement.mode=colocated", "placement.nodes=2", "placement.gpus_per_node=1", "placement.device=cpu", "train.offload=all")
SIZES = {"servers": None, "gpus_per_server": None, "gpus_per_node": None, "bucket_bytes": None}


@pytest.mark.parametrize(
    ("words", "route", "is_card_s"),
    [
        ((f"recipe={SEPARATE}",), "nccl, from GPU to GPU", True),
        ((f"recipe={SHARED}",), "relay: NCCL among the trainer's ranks", True),
        ((f"recipe={SHARED}", *HALF_SHARED), "nccl over gloo: TCP through host memory", False),
        ((f"recipe={TINY}", *ON_TWO_NODES), "relay over gloo: TCP from host memory", False),
        ((f"recipe={SHARED}", "weights.transport=disk", "weights.disk_delta=false"), "disk: files", False),
        ((f"recipe={TINY}",), "ipc, on one node", False),
        ((f"recipe={TINY}", "placement.mode=colocated", "train.offload=all", "weights.transport=nccl"), "relay: NCCL among", True),
        ((f"recipe={TINY}", "weights.transport=nccl"), "nccl, from GPU to GPU", True),
        ((f"recipe={TINY}", "weights.transport=nccl", "placement.device=cpu"), "nccl over gloo: TCP from host memory", False),
    ],
)
def test_the_transport_is_the_run_s(words, route, is_card_s):
    found = route_of(load_checked(list(words)))
    assert found.words.startswith(route) and found.is_card_s == is_card_s


def test_bytes_are_told_as_over_the_network_only_where_there_is_one_or_a_rate_for_one_is_given():
    config = load_checked([f"recipe={TINY}", "rollout.num_servers=2"])
    plain, given = (plan_push(config, **SIZES, card_gbit=rate) for rate in (None, 10.0))
    whole = plain.expert_bytes + plain.other_bytes
    assert plain.taken == (whole, whole), "each server has all of it, whoever brings it"
    assert "network in" not in str(plain) and "packed  " in str(plain) and "taken  " in str(plain)
    assert "network in" in str(given) and "taken  " not in str(given)


def test_a_figure_is_told_of_a_card_or_of_a_rate_that_is_given():
    config = load_checked([f"recipe={TINY}"])
    plain, given = (str(plan_push(config, **SIZES, card_gbit=rate)) for rate in (None, 10.0))
    assert "transport        ipc" in plain and "bound            not told" in plain and "for comparison" not in plain
    assert "at 10 Gbit/s: the busiest card alone" in given and "for comparison" in given
    over_cards = load_checked([f"recipe={TINY}", "weights.transport=nccl"])
    assert "at 400 Gbit/s: the busiest card alone" in str(plan_push(over_cards, **SIZES, card_gbit=None))


def test_experts_are_spread_as_the_recipe_says_but_over_all_gpus_of_other_servers():
    config = load([f"recipe={SEPARATE}"])
    layout = replace(config.rollout.layout, gpus=8, ep=2)
    config = replace(config, rollout=replace(config.rollout, layout=layout))
    assert [rollout_of(config, gpus_per_server=gpus).expert_shares for gpus in (None, 16)] == [2, 16]


def test_bytes_are_those_of_the_model_and_all_that_is_promised_is_told():
    config = load_checked([f"recipe={TINY}"])
    found = plan_push(config, **SIZES, card_gbit=10.0)
    others, experts = model_parameters(model_config(config.model))
    assert (found.expert_bytes, found.other_bytes) == (4 * experts, 4 * others)
    assert [line[:17].strip() for line in str(found).splitlines()] == [
        "model", "trainer", "rollout", "network in", "network out", "within nodes", "transport", "bound", "schedule", "incomplete",
        "for comparison",
    ]  # fmt: skip


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_largest_tensors_of_a_push_are_counted_once_where_the_output_layer_is_the_embedding(is_tied):
    config = load(["recipe=grpo-qwen3-0.6b-1n1g-sync", "rollout.engine=vllm"])
    hf = published_config("qwen3-0.6b") | {"tie_word_embeddings": is_tied}
    assert largest_tensors(hf, config) == (1 if is_tied else 2) * 2 * 151936 * 1024
