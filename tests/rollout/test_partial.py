"""Completions that are ended again and again and come out whole, over real servers."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_servers import MAX_RUNNING, ROUTES, VOCAB, collector, until, whole

from moerl.rollout.fleet.completion_check import check_routes
from moerl.rollout.fleet.continuation import joined
from moerl.rollout.fleet.rollout_pool import MAX_ATTEMPTS, RolloutPool
from moerl.rollout.server.wire import dump_completion, parse_completion
from moerl.types.completion import Completion, DraftCounts, SamplingParams, VersionSpan
from moerl.types.errors import EngineUnavailable

PROMPT = (5, 17, 3, 42, 8)


class Interrupted:
    """The engine, but its n-th request is ended after cuts[n] tokens; None: it is lost with the server, which comes back."""

    def __init__(self, engine, cuts):
        self.name, self._engine, self._cuts, self.num_asked = engine.name, engine, cuts, 0

    async def generate(self, prompt_ids, sampling, request_id):
        cut = self._cuts[self.num_asked] if self.num_asked < len(self._cuts) else sampling.max_tokens
        self.num_asked += 1
        if cut is None:
            asyncio.get_running_loop().call_soon(self.come_back)
            raise EngineUnavailable(f"{self.name}: {request_id}: the server ended")
        if cut == 0:
            return Completion(request_id=request_id, token_ids=(), logprobs=(), spans=(), finish_reason="abort")
        part = await self._engine.generate(prompt_ids, replace(sampling, max_tokens=min(cut, sampling.max_tokens)), request_id)
        return replace(part, finish_reason="abort") if part.finish_reason == "length" and cut <= sampling.max_tokens else part


def pool_of(engine, *, with_routes=False):
    pool = RolloutPool(
        [engine], max_running=MAX_RUNNING, max_queued=2, collector=collector(ROUTES["moe"] if with_routes else None), request_seconds=60
    )
    if isinstance(engine, Interrupted):
        engine.come_back = lambda: pool.fleet.served(pool.fleet.members)
    pool.fleet.served(pool.fleet.members)
    return pool


def assert_same(found, expected, abs_error=1e-5):
    """Log-probs up to the order of additions: a prompt is computed in other pieces than a response."""
    assert (found.token_ids, found.finish_reason) == (expected.token_ids, expected.finish_reason)
    assert found.logprobs == pytest.approx(expected.logprobs, abs=abs_error)
    assert sum(span.num_tokens for span in found.spans) == len(found.token_ids)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cuts=st.lists(st.one_of(st.integers(0, 9), st.none()), max_size=6).filter(lambda cuts: cuts.count(None) < MAX_ATTEMPTS),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    seed=st.integers(0, 2**63),
    stops=st.sets(st.integers(0, VOCAB - 1), max_size=4),
    max_tokens=st.integers(1, 20),
)
def test_any_pattern_of_aborts_gives_the_tokens_of_an_undisturbed_request(run, served_moe, cuts, temperature, seed, stops, max_tokens):
    sampling = SamplingParams(
        max_tokens=max_tokens, seed=seed, temperature=temperature, stop_token_ids=tuple(stops), returns_routes=True, top_p=0.95
    )

    async def scenario():
        pool = pool_of(Interrupted(served_moe.engine, cuts), with_routes=True)
        return await served_moe.engine.generate(PROMPT, sampling, "whole"), whole(await pool.generate(PROMPT, sampling, "parts"))

    undisturbed, parts = run(scenario())
    assert_same(parts, undisturbed)
    assert parts.spans == (VersionSpan(version=1, num_tokens=len(parts.token_ids)),)
    check_routes(parts, num_prompt=len(PROMPT), shape=ROUTES["moe"])
    np.testing.assert_array_equal(parts.routes, undisturbed.routes)


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.matrix), 1.0])
def test_requests_of_a_push_go_on_after_it(run, served, temperature):
    """Two pushes of the same weights as other versions, and more requests than the server runs at once."""
    lengths = {"short": 8} | {f"r{i}": served.long * 3 // 4 for i in range(MAX_RUNNING + 1)}
    requests = {name: SamplingParams(max_tokens=lengths[name], seed=i, temperature=temperature) for i, name in enumerate(lengths)}

    async def scenario():
        pool = pool_of(served.engine)
        wholes = await asyncio.gather(*(served.engine.generate(PROMPT, sampling, name) for name, sampling in requests.items()))
        tasks = [asyncio.create_task(pool.generate(PROMPT, sampling, name)) for name, sampling in requests.items()]
        await tasks[0]  # those beside it have tokens too now
        for version in (2, 3):
            await until(served.engine, lambda health: health.num_running == MAX_RUNNING)
            await pool.pause("abort")
            await served.push(version)
            await pool.resume()
        return wholes, list(map(whole, await asyncio.gather(*tasks))), pool.num_resumed

    wholes, parts, num_resumed = run(scenario())
    assert num_resumed >= 2 * (MAX_RUNNING - 1), "all but the one that took the short one's place, which may have no token yet"
    for part, length in zip(parts, lengths.values(), strict=True):
        versions = [span.version for span in part.spans]
        assert versions == sorted(set(versions))
        assert sum(span.num_tokens for span in part.spans) == length
    assert any(len(part.spans) > 1 for part in parts)
    if served.engine.name.startswith("fake"):
        return  # its tokens are a function of the version
    for undisturbed, part in zip(wholes, parts, strict=True):
        assert_same(part, undisturbed, abs_error=1e-4)


def test_one_that_is_ended_after_its_last_token_is_not_asked_for_again(run, served_moe):
    async def scenario():
        engine = Interrupted(served_moe.engine, [4, 6])
        return whole(await pool_of(engine).generate(PROMPT, SamplingParams(max_tokens=10, seed=1), "r")), engine.num_asked

    completion, num_asked = run(scenario())
    assert (len(completion.token_ids), completion.finish_reason, num_asked) == (10, "length", 2)


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_only_what_is_computed_anew_has_the_log_probs_of_the_new_weights_alone(run, served_moe, mode):
    """Of a greedy completion over a push of other weights, what came after it against a request that begins there."""

    async def scenario():
        pool = pool_of(served_moe.engine)
        task = asyncio.create_task(pool.generate(PROMPT, SamplingParams(max_tokens=200, seed=0, temperature=0.0), "r"))
        await until(served_moe.engine, lambda health: health.num_running == 1)
        await served_moe.engine.generate(PROMPT, SamplingParams(max_tokens=8, seed=0), "beside")  # decoded together: 8 tokens more
        await pool.pause(mode)
        await served_moe.push(2, scale=1.05)
        await pool.resume()
        found = whole(await task)
        at = found.spans[0].num_tokens
        anew = await served_moe.engine.generate(PROMPT + found.token_ids[:at], SamplingParams(max_tokens=1, seed=0, temperature=0.0), "a")
        return found.spans, found.logprobs[at], anew.logprobs[0]

    spans, found, anew = run(scenario())
    assert [span.version for span in spans] == [1, 2]
    assert (found == pytest.approx(anew, abs=1e-5)) == (mode == "abort")


def test_a_token_keeps_the_route_and_the_version_of_when_it_was_computed_first():
    """Two prompt tokens, three drawn with version 1, then two with 1 and one with 2."""
    first = Completion(
        request_id="r", token_ids=(7, 8, 9), logprobs=(-1.0, -2.0, -3.0), spans=(VersionSpan(version=1, num_tokens=3),),
        finish_reason="abort", routes=np.full((4, 1, 2), 10, dtype=np.uint8), drafts=DraftCounts(2, 1),
    )  # fmt: skip
    more = Completion(
        request_id="r", token_ids=(1, 2, 3), logprobs=(-4.0, -5.0, -6.0),
        spans=(VersionSpan(version=1, num_tokens=2), VersionSpan(version=2, num_tokens=1)), finish_reason="stop",
        routes=np.full((7, 1, 2), 20, dtype=np.uint8), drafts=DraftCounts(1, 2),
    )  # fmt: skip
    result = joined(first, parse_completion(dump_completion(more)))
    assert result.drafts == DraftCounts(3, 3)
    assert (result.token_ids, result.logprobs) == ((7, 8, 9, 1, 2, 3), (-1.0, -2.0, -3.0, -4.0, -5.0, -6.0))
    assert result.spans == (VersionSpan(version=1, num_tokens=5), VersionSpan(version=2, num_tokens=1))
    assert (result.finish_reason, result.routes.dtype) == ("stop", np.uint8)
    assert result.routes[:, 0, 0].tolist() == [10] * 4 + [20] * 3
