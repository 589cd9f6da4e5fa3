"""Deterministic servers: a completion has the same tokens and the same bits of its log-probs in any company, order and slot."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from moerl.rollout.engines.hf.cache import KeyRun, attend
from moerl.rollout.engines.hf.experts import TILE_ROWS, PassTokens, experts_in_tiles
from moerl.rollout.engines.hf.forward import Forward, _runs
from moerl.rollout.engines.hf.hf_model import load_model
from moerl.rollout.engines.hf.scheduler import MOST_PUT_OFF, Scheduler, SlotRequest
from moerl.types.completion import SamplingParams

NUM_SLOTS = 24
RNG = np.random.default_rng(11)
SUBJECT = (tuple(RNG.integers(0, 61, size=19).tolist()), SamplingParams(max_tokens=30, seed=5, temperature=0.9, top_p=0.95))
OTHERS = [
    (
        tuple(RNG.integers(0, 61, size=RNG.integers(1, 50)).tolist()),
        SamplingParams(max_tokens=int(RNG.integers(1, 40)), seed=i, top_k=i % 3),
    )
    for i in range(30)
]
GROUP = [(SUBJECT[0], SamplingParams(max_tokens=25, seed=100 + i)) for i in range(5)]
"""Share the subject's prompt, and so its prefill."""


def request_of(name, what, outcomes):
    prompt, sampling = what
    prompt_ids = np.array(prompt, dtype=np.int64)
    return SlotRequest(key=name, prompt_ids=prompt_ids, sampling=sampling, done=lambda sampled: outcomes.__setitem__(name, sampled))


class Batch:
    """A scheduler without server: `at` maps iteration -> requests that arrive before it."""

    def __init__(self, directory: Path, *, deterministic: bool):
        options = dict(deterministic=deterministic, max_context=256)
        model = load_model(directory, dtype=torch.float32, load="checkpoint", **options)
        self.forward = Forward(model, num_slots=NUM_SLOTS, prefill_chunk=8, **options)

    def complete(self, at):
        scheduler, outcomes = Scheduler(self.forward, max_context=256), {}
        iteration = 0
        while iteration <= max(at) or scheduler.has_work:
            scheduler.add(request_of(name, request, outcomes) for name, request in at.get(iteration, {}).items())
            scheduler.step(1)
            iteration += 1
        return outcomes


@pytest.fixture(scope="module", params=["moe", "dense", "latent"])
def batch(request, checkpoints):
    torch.set_num_threads(1)
    return Batch(checkpoints[request.param].directory, deterministic=True)


@pytest.fixture(scope="module")
def alone(batch):
    completion = batch.complete({0: {"subject": SUBJECT}})["subject"]
    assert len(set(completion.token_ids)) > 5
    return completion


def others(count=30):
    return {f"other-{i}": request for i, request in enumerate(OTHERS[:count])}


@pytest.mark.parametrize(
    "at",
    [
        {0: {"subject": SUBJECT, **others(20)}},
        {0: {**others(20), "subject": SUBJECT}},
        {0: others(7), 5: {"subject": SUBJECT}, 9: {f"later-{i}": request for i, request in enumerate(OTHERS[8:20])}},
        {0: others(30), 1: {"subject": SUBJECT}},
        {0: {"subject": SUBJECT, **{f"group-{i}": request for i, request in enumerate(GROUP)}}},
        {0: {**{f"group-{i}": request for i, request in enumerate(GROUP)}, "subject": SUBJECT, **others(10)}},
    ],
    ids=["first-of-21", "last-slot-of-21", "others-come-and-go", "more-than-slots", "leads-its-group", "follows-in-its-group"],
)
def test_a_completion_has_the_same_bits_in_any_company(batch, alone, at):
    assert batch.complete(at)["subject"] == alone


def test_every_request_of_a_batch_has_the_bits_it_has_alone(batch):
    together = batch.complete({0: others(22)})
    for name, request in others(22).items():
        assert together[name] == batch.complete({0: {name: request}})[name]


def test_prompts_wait_for_others_until_they_have_lost_what_a_pass_costs(batch, monkeypatch):
    """Twenty decode. Of three that come one after the other the pass is shared when they have lost twenty tokens: 1 + 2 + 3 + 3 + ..."""
    scheduler, outcomes, passes = Scheduler(batch.forward, max_context=256), {}, []
    for kind in ("prefill", "decode"):
        upstream = getattr(batch.forward, kind)
        monkeypatch.setattr(
            batch.forward, kind, lambda *args, _kind=kind, _call=upstream, **more: (passes.append(_kind), _call(*args, **more))[1]
        )
    scheduler.add(request_of(f"first-{i}", ((3, 4), SamplingParams(max_tokens=60, seed=i)), outcomes) for i in range(20))
    scheduler.step(1)
    for number in range(3):
        scheduler.add([request_of(f"late-{number}", ((5, 6 + number), SamplingParams(max_tokens=4, seed=number)), outcomes)])
        scheduler.step(1)
    while passes.count("prefill") < 2:
        scheduler.step(1)
    assert passes == ["prefill", *["decode"] * 7, "prefill"]
    scheduler.add([request_of("canary", ((9, 9), SamplingParams(max_tokens=1, seed=0, goes_first=True)), outcomes)])
    scheduler.step(1)
    assert passes[-1] == "prefill" and "canary" in outcomes
    scheduler.add([request_of("alone", ((9, 8), SamplingParams(max_tokens=1, seed=0)), outcomes)])
    del passes[:]
    while "alone" not in outcomes:
        scheduler.step(1)
    assert passes == [*["decode"] * MOST_PUT_OFF, "prefill"]


def test_the_share_of_the_cache_goes_with_the_last_request_that_is_aborted(batch):
    scheduler, outcomes = Scheduler(batch.forward, max_context=256), {}
    scheduler.add([request_of("subject", SUBJECT, outcomes)])
    for _ in range(5):
        scheduler.step(1)
    assert scheduler.cache_share > 0
    scheduler.abort("subject")  # no iteration follows
    assert scheduler.cache_share == 0


def test_what_a_slot_held_before_does_not_matter(batch, alone):
    for layer in batch.forward.cache.layers:
        layer.keys[0] = layer.values[0] = torch.nan  # the subject takes the lowest slot
    assert batch.complete({0: {"subject": SUBJECT}})["subject"] == alone


def test_an_abort_in_a_shared_prefill_does_not_change_the_others(batch, alone):
    outcomes = {}
    scheduler = Scheduler(batch.forward, max_context=256)
    group = {"leader": GROUP[0], "subject": SUBJECT, "third": GROUP[1]}
    scheduler.add(request_of(name, request, outcomes) for name, request in group.items())
    scheduler.step(1)  # one chunk of the prompt
    scheduler.abort("leader")
    while scheduler.has_work:
        scheduler.step(1)
    assert outcomes["leader"].token_ids == ()
    assert outcomes["subject"] == alone
    assert len(outcomes["third"].token_ids) == 25


def test_a_request_after_a_push_does_not_join_a_prefill_begun_before_it(batch):
    """Its first chunks hold keys and values of the old weights."""
    outcomes = {}
    scheduler = Scheduler(batch.forward, max_context=256)
    scheduler.add([request_of("old", SUBJECT, outcomes)])
    scheduler.step(1)
    embedding = batch.forward._body.embed_tokens.weight
    saved = embedding.clone()
    try:
        embedding.mul_(0.5)
        scheduler.add([request_of("new", SUBJECT, outcomes)])
        while scheduler.has_work:
            scheduler.step(2)
        fresh = batch.complete({0: {"new": SUBJECT}})["new"]
    finally:
        embedding.copy_(saved)
    assert outcomes["new"].logprobs == fresh.logprobs
    assert outcomes["old"].logprobs != fresh.logprobs


@pytest.mark.parametrize("value_dim", [16, 8], ids=["alike", "narrower-values"])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_a_rows_attention_has_the_same_bits_however_rows_are_put_together(has_sinks, value_dim):
    """And in whatever it does not see; rows of no run are 0."""
    generator = torch.Generator().manual_seed(3)
    query, key = torch.randn(24, 4, 1, 16, generator=generator), torch.randn(24, 2, 96, 16, generator=generator)
    value = torch.randn(24, 2, 96, value_dim, generator=generator)
    lengths = np.resize([16, 16, 32, 64, 32], 24)
    mask = torch.where(torch.arange(96) < torch.from_numpy(lengths)[:, None] - 3, 0.0, -torch.inf)[:, None, None].expand(-1, 1, 2, -1)
    sinks = torch.randn(4, generator=generator) if has_sinks else None

    def attended(runs, key=key):
        return attend(torch.nn.Identity(), query, key, value, mask, 0.25, s_aux=sinks, key_runs=runs)[0]

    alone = attended([KeyRun(first=row, end=row + 1, kv_length=int(length)) for row, length in enumerate(lengths)])
    is_used = np.arange(24) % 7 != 0
    together = attended(_runs(lengths, is_used))
    assert torch.equal(together[is_used], alone[is_used])
    unseen = torch.where(torch.arange(96)[:, None] < 64, key, 7.0)
    assert torch.equal(attended(_runs(lengths, is_used), unseen), together)
    whole = attend(torch.nn.Identity(), query, key, value, mask, 0.25, s_aux=sinks)[0]
    torch.testing.assert_close(alone, whole, rtol=1e-5, atol=1e-6)
    assert not attended([KeyRun(first=4, end=9, kv_length=64)])[:4].any()


@pytest.mark.parametrize("name", ["moe", "dense", "latent"])
def test_the_fast_shapes_give_the_same_completions_up_to_rounding(checkpoints, name):
    exact, fast = (Batch(checkpoints[name].directory, deterministic=choice).complete({0: others(22)}) for choice in (True, False))
    for request_id, completion in exact.items():
        assert fast[request_id].token_ids == completion.token_ids
        assert fast[request_id].logprobs == pytest.approx(completion.logprobs, abs=1e-4)


def test_over_http_a_completion_has_the_bits_it_has_alone(run, served_moe):
    async def scenario():
        alone = await served_moe.engine.generate(*SUBJECT, "subject")
        noise = [asyncio.create_task(served_moe.engine.generate(*request, name)) for name, request in others().items()]
        crowded = await served_moe.engine.generate(*SUBJECT, "subject")
        await asyncio.gather(*noise)
        return alone, crowded

    alone, crowded = run(scenario())
    assert crowded == alone


@pytest.mark.parametrize("family", [Qwen3MoeConfig, GptOssConfig])
def test_experts_give_a_token_the_same_bits_whatever_others_choose(family):
    """Both layouts of experts: gpt-oss has biases and matrices the other way around."""
    config = family(hidden_size=64, moe_intermediate_size=48, intermediate_size=48, num_experts=8, num_local_experts=8)
    kind = {Qwen3MoeConfig: Qwen3MoeExperts, GptOssConfig: GptOssExperts}[family]
    experts, tokens = kind(config), PassTokens()
    draw = torch.Generator().manual_seed(3)
    for parameter in experts.parameters():
        parameter.data.normal_(generator=draw).mul_(0.2)
    experts.moerl_tokens = tokens
    count = 3 * TILE_ROWS + 5
    hidden = torch.randn(count, 64, generator=draw)
    weights, chosen = torch.rand(count, 8, generator=draw).topk(2)
    with torch.inference_mode():
        together = experts_in_tiles(experts, hidden, chosen, weights)
        torch.testing.assert_close(together, type(experts).forward.__wrapped__(experts, hidden, chosen, weights))
        for some in (torch.tensor([40]), torch.arange(0, count, 3), torch.arange(count).flip(0)):
            assert torch.equal(experts_in_tiles(experts, hidden[some], chosen[some], weights[some]), together[some])
        tokens.is_used = np.arange(count) % 3 == 1
        padded = experts_in_tiles(experts, hidden, chosen, weights)
    used = torch.from_numpy(tokens.is_used)
    assert torch.equal(padded[used], together[used]) and not padded[~used].any()
