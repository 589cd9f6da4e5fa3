"""What servers say about their caches: the real ones, of which two have too small a cache for the requests they run."""

import asyncio

import pytest
from test_contract import PROMPT, ask, running
from tiny_servers import MAX_RUNNING, ROUTES, collector, native_engine, native_param, push, until

from moerl.rollout.fleet.rollout_pool import RolloutPool
from moerl.types.completion import SamplingParams, ServerLoad

SMALL_CACHE = {"sglang-moe": {"max_total_tokens": 700}, "vllm-moe32": {"num_gpu_blocks_override": 7}}
"""Some 700 tokens: vLLM's blocks on CPU are of 128, and one is its own."""
LONG = 300


def test_a_server_reports_the_share_of_its_cache_that_requests_hold(run, served):
    async def scenario():
        task = ask(served, "a", max_tokens=served.long)
        await running(served, task)
        await until(served.engine, lambda health: health.load.cache_share > 0 or served.engine.name == "fake-0")
        during = (await served.engine.health()).load
        answered = (await task).load
        await until(served.engine, lambda health: health.load.cache_share == 0)
        return during, answered, await ask(served, "b", max_tokens=1)

    during, answered, _ = run(scenario())
    if served.engine.name == "fake-0":
        assert during == answered == ServerLoad()
    else:
        assert 0 < during.cache_share < 0.5 and 0 <= answered.cache_share < 0.5
    assert during.num_preempted == answered.num_preempted == 0


@pytest.mark.parametrize("kind", [native_param(kind) for kind in SMALL_CACHE])
def test_the_pools_bound_follows_an_engine_that_preempts(run, checkpoints, tmp_path, kind):
    engine = native_engine(kind, checkpoints[kind.split("-")[1]], tmp_path, engine_args=SMALL_CACHE[kind])
    shares = []

    async def watch():
        while True:
            shares.append((await engine.health()).load.cache_share)
            await asyncio.sleep(0.01)

    async def scenario():
        await engine.start()
        try:
            await push(engine, checkpoints[kind.split("-")[1]].tensors, 1)
            pool = RolloutPool([engine], max_running=MAX_RUNNING, max_queued=2, collector=collector(), request_seconds=200)
            pool.fleet.served(pool.fleet.members)
            watching = asyncio.create_task(watch())
            asked = (pool.generate(PROMPT, SamplingParams(max_tokens=LONG, seed=seed), f"r{seed}") for seed in range(MAX_RUNNING + 2))
            answers, bound = await asyncio.gather(*asked), pool.least_bound
            watching.cancel()
            await until(engine, lambda health: health.load.cache_share < 0.2)  # SGLang counts what has ended after an iteration more
            return answers, pool.num_preempted, bound, (await engine.health()).load.cache_share
        finally:
            await engine.close()

    answers, num_preempted, bound, idle = run(scenario())
    assert [answer.completion.num_tokens for answer in answers] == [LONG] * (MAX_RUNNING + 2)
    assert num_preempted > 0 and max(shares) > 0.9 and bound < MAX_RUNNING + 2
    assert idle < 0.2


@pytest.mark.engine
@pytest.mark.parametrize("asked", [{"returns_routes": True}, {"filtered": True, "top_k": 20}], ids=["routes", "sets"])
def test_a_request_that_sglang_had_taken_back_goes_on_after_a_push(run, checkpoints, tmp_path, asked):
    """It waits in SGLang's own queue with tokens, of which the answer to its abort has some, and neither routes nor what top-k left."""
    arguments = SMALL_CACHE["sglang-moe"] | {"schedule_conservativeness": 0.03}  # else it begins one only where its whole answer has room
    engine = native_engine("sglang-moe", checkpoints["moe"], tmp_path, engine_args=arguments)

    async def scenario():
        await engine.start()
        try:
            await push(engine, checkpoints["moe"].tensors, 1)
            pool = RolloutPool([engine], max_running=MAX_RUNNING, max_queued=0, collector=collector(ROUTES["moe"]), request_seconds=200)
            pool.fleet.served(pool.fleet.members)
            sampling = [SamplingParams(max_tokens=LONG, seed=seed, **asked) for seed in range(MAX_RUNNING)]
            tasks = [asyncio.create_task(pool.generate(PROMPT, each, f"r{each.seed}")) for each in sampling]
            await until(engine, lambda health: health.load.cache_share > 0.9)
            await until(engine, lambda health: health.load.cache_share < 0.8)
            assert not any(task.done() for task in tasks)
            await pool.pause("abort")
            await push(engine, checkpoints["moe"].tensors, 2)
            await pool.resume()
            return await asyncio.gather(*tasks)
        finally:
            await engine.close()

    completions = [answer.completion for answer in run(scenario())]
    assert [completion.num_tokens for completion in completions] == [LONG] * MAX_RUNNING
    assert {len(completion.spans) for completion in completions} == {1, 2}, "one of them began anew"
