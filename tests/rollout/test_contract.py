"""What moerl.rollout.server.contract promises, for every engine."""

import asyncio
import re
from contextlib import nullcontext

import family_servers
import numpy as np
import pytest
import torch
from tiny_servers import SERVED, until
from transformers import AutoModelForCausalLM

from moerl.config.derive.model_shape import read_config, shape_of_config
from moerl.models.transformers_config import read_transformers_config
from moerl.rollout.engines.fake_engine import FakeCore
from moerl.rollout.engines.hf.forward import RouteRecorder
from moerl.rollout.engines.hf.hf_model import checkpoint_views
from moerl.rollout.server.limits import Limits
from moerl.rollout.server.server_state import ServerState
from moerl.types.completion import SamplingParams, VersionSpan
from moerl.types.errors import EngineError, WeightError
from moerl.types.push import Manifest, Piece
from moerl.weights.plan.spec_tensors import spec_of
from moerl.weights.verify.digest import tensor_digest

PROMPT = (5, 17, 3, 3, 42, 8, 11, 60, 1, 2, 29)


OF_EVERY_FAMILY = pytest.mark.parametrize("served", [*SERVED, *family_servers.PARAMS], indirect=True)
"""Of what a model could change; the rest is the engine's, whatever it serves."""


def ask(served, name, *, max_tokens=12, seed=7, prompt=PROMPT, **sampling):
    return asyncio.create_task(served.engine.generate(prompt, SamplingParams(max_tokens=max_tokens, seed=seed, **sampling), name))


async def running(served, *asked):
    """Returns when all of `asked` run. One that ends before that says so, and why."""
    await until(served.engine, lambda health: health.num_running == len(asked) or any(task.done() for task in asked))
    assert not [task for task in asked if task.done()]


def spans_of(*runs):
    return tuple(VersionSpan(version=version, num_tokens=num_tokens) for version, num_tokens in runs)


def assert_prefix(part, whole):
    """Log-probs may differ in the last bits: only deterministic servers keep those, see test_batch_invariance."""
    count = len(part.token_ids)
    assert part.token_ids == whole.token_ids[:count]
    assert part.logprobs == pytest.approx(whole.logprobs[:count], abs=1e-4)


@OF_EVERY_FAMILY
def test_a_completion_has_a_logprob_and_a_version_for_every_token(run, served):
    async def scenario():
        return await ask(served, "a")

    completion = run(scenario())
    assert completion.request_id == "a" and completion.finish_reason == "length"
    assert len(completion.token_ids) == len(completion.logprobs) == 12
    assert completion.spans == spans_of((1, 12))
    assert all(logprob <= 0 for logprob in completion.logprobs)


@OF_EVERY_FAMILY
def test_a_completion_is_a_function_of_prompt_and_seed(run, served):
    async def scenario():
        tasks = [ask(served, "a"), ask(served, "b"), ask(served, "c", seed=8), ask(served, "d", prompt=PROMPT[:4])]
        return [(await task).token_ids for task in tasks]

    first, same, other_seed, other_prompt = run(scenario())
    assert first == same
    assert first != other_seed and first != other_prompt


def test_a_shorter_request_of_the_same_seed_is_a_prefix_of_the_longer(run, served):
    async def scenario():
        return await ask(served, "a"), await ask(served, "b", max_tokens=5)

    long, short = run(scenario())
    assert_prefix(short, long)


def test_greedy_completions_do_not_depend_on_the_seed(run, served):
    async def scenario():
        return await ask(served, "a", temperature=0.0), await ask(served, "b", temperature=0.0, seed=99)

    a, b = run(scenario())
    assert a.token_ids == b.token_ids


@OF_EVERY_FAMILY
def test_a_stop_token_ends_the_completion_and_belongs_to_it(run, served):
    async def scenario():
        whole = await ask(served, "a")
        stop = whole.token_ids[4]
        return whole, await ask(served, "b", stop_token_ids=(stop,)), stop

    whole, stopped, stop = run(scenario())
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]


def test_more_requests_than_slots_all_complete(run, served):
    async def scenario():
        tasks = [ask(served, f"r{i}", seed=i) for i in range(15)]
        most = 0
        while not all(task.done() for task in tasks):
            most = max(most, (await served.engine.health()).num_running)
            await asyncio.sleep(0)
        return most, [await task for task in tasks], await served.engine.health()

    most, completions, health = run(scenario())
    assert most <= 4
    assert [completion.request_id for completion in completions] == [f"r{i}" for i in range(15)]
    assert (health.num_running, health.num_waiting) == (0, 0)


def test_abort_returns_the_tokens_so_far(run, served):
    async def scenario():
        whole = await ask(served, "whole", max_tokens=served.long)
        aborted = ask(served, "cut", max_tokens=served.long)
        await running(served, aborted)
        await ask(served, "other")  # begins after it, so that it has tokens too
        await served.engine.abort(("cut", "unknown"))
        return whole, await aborted

    whole, aborted = run(scenario())
    assert aborted.finish_reason == "abort"
    assert 0 < len(aborted.token_ids) < served.long
    assert_prefix(aborted, whole)
    assert aborted.spans == spans_of((1, len(aborted.token_ids)))


def test_abort_of_all_ends_waiting_requests_too(run, served):
    async def scenario():
        tasks = [ask(served, f"r{i}", max_tokens=served.long) for i in range(7)]
        await until(served.engine, lambda health: (health.num_running, health.num_waiting) == (4, 3))
        await served.engine.abort()
        completions = await asyncio.gather(*tasks)
        await until(served.engine, lambda health: health.num_running + health.num_waiting == 0)
        return completions

    completions = run(scenario())
    assert {completion.finish_reason for completion in completions} == {"abort"}
    assert [completion.spans for completion in completions[4:]] == [(), (), ()]


def test_pause_keep_holds_requests_and_resume_lets_them_go_on(run, served):
    async def scenario():
        whole = await ask(served, "whole", max_tokens=served.long)
        task = ask(served, "held", max_tokens=served.long)
        await running(served, task)
        await served.engine.pause("keep")
        late = ask(served, "late")
        await until(served.engine, lambda health: health.num_waiting == 1)
        health = await served.engine.health()
        held = not task.done() and not late.done()
        await served.engine.resume()
        return whole, await task, await late, health, held

    whole, completion, late, health, held = run(scenario())
    assert held and health.status == "paused" and health.num_running == 1
    assert len(completion.token_ids) == served.long
    assert_prefix(completion, whole)
    assert late.finish_reason == "length"


def test_pause_wait_returns_when_the_running_requests_have_finished(run, served):
    async def scenario():
        tasks = [ask(served, f"r{i}", max_tokens=served.long) for i in range(6)]
        await until(served.engine, lambda health: (health.num_running, health.num_waiting) == (4, 2))
        await served.engine.pause("wait")
        health = await served.engine.health()
        finished = await asyncio.gather(*tasks[:4])
        waiting = [task.done() for task in tasks[4:]]
        await served.engine.resume()
        return health, finished, waiting, await asyncio.gather(*tasks[4:])

    health, finished, waiting, rest = run(scenario())
    assert (health.status, health.num_running, health.num_waiting) == ("paused", 0, 2)
    assert waiting == [False, False]
    assert {completion.finish_reason for completion in (*finished, *rest)} == {"length"}


def test_pause_wait_fails_when_resume_comes_first(run, served):
    async def scenario():
        task = ask(served, "long", max_tokens=served.long)
        await running(served, task)
        pause = asyncio.create_task(served.engine.pause("wait"))
        await until(served.engine, lambda health: health.status == "paused")
        await served.engine.resume()
        with pytest.raises(EngineError, match="resume"):
            await pause
        return await task

    assert run(scenario()).finish_reason == "length"


def test_pause_abort_ends_running_requests_and_keeps_waiting_ones(run, served):
    async def scenario():
        tasks = [ask(served, f"r{i}", max_tokens=served.long) for i in range(5)]
        await until(served.engine, lambda health: (health.num_running, health.num_waiting) == (4, 1))
        await served.engine.pause("abort")
        aborted = await asyncio.gather(*tasks[:4])
        health, waits = await served.engine.health(), not tasks[4].done()
        await served.engine.resume()
        return aborted, health, waits, await tasks[4]

    aborted, health, waits, rest = run(scenario())
    assert {completion.finish_reason for completion in aborted} == {"abort"}
    assert (health.status, health.num_running, health.num_waiting) == ("paused", 0, 1) and waits
    assert rest.finish_reason == "length" and len(rest.token_ids) == served.long


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
@OF_EVERY_FAMILY
def test_a_request_held_over_a_push_has_a_span_for_each_version(run, served, transport):
    async def scenario():
        whole = await ask(served, "whole", max_tokens=served.long)
        task = ask(served, "held", max_tokens=served.long)
        await running(served, task)
        await ask(served, "short", max_tokens=3)
        await served.engine.pause("keep")
        await served.push(2, scale=0.8, transport=transport)
        await served.engine.resume()
        return whole, await task, await served.engine.health()

    whole, completion, health = run(scenario())
    assert (health.status, health.version) == ("healthy", 2)
    assert [span.version for span in completion.spans] == [1, 2]
    before = completion.spans[0].num_tokens
    assert 0 < before < served.long and before + completion.spans[1].num_tokens == served.long
    assert completion.token_ids[:before] == whole.token_ids[:before]
    assert completion.token_ids != whole.token_ids


def test_a_paused_server_takes_requests_during_a_push_and_serves_them_with_the_new_version(run, served):
    async def scenario():
        await served.engine.pause("keep")
        await served.engine.begin(manifest_of(served, version=2))
        task = ask(served, "early")
        await until(served.engine, lambda health: health.num_waiting == 1)
        status = (await served.engine.health()).status
        await served.push(2)
        await served.engine.resume()
        return status, await task

    status, completion = run(scenario())
    assert status == "stale"
    assert completion.spans == spans_of((2, 12))


def test_a_push_without_a_pause_refuses_new_requests(run, served):
    async def scenario():
        await served.engine.begin(manifest_of(served, version=2))
        with pytest.raises(EngineError, match="stale: the push of version 2 is in progress"):
            await ask(served, "early")
        await served.push(2)
        return await ask(served, "late")

    assert run(scenario()).spans == spans_of((2, 12))


def manifest_of(served, *, version, leave_out=""):
    specs = tuple(spec_of(name, tensor) for name, tensor in served.tensors.items() if name != leave_out)
    digests = {spec.name: tensor_digest(served.tensors[spec.name]) for spec in specs}
    pieces = {s.name: (Piece(start=(0,) * len(s.shape), shape=s.shape, ranks=(0,), digest=digests[s.name]),) for s in specs}
    return Manifest(version=version, tensors=specs, pieces=pieces)


@OF_EVERY_FAMILY
def test_a_manifest_of_another_model_is_refused_and_leaves_the_server_stale(run, served):
    async def scenario():
        with pytest.raises(WeightError, match="1 missing: model.norm.weight"):
            await served.engine.begin(manifest_of(served, version=2, leave_out="model.norm.weight"))
        health = await served.engine.health()
        with pytest.raises(EngineError, match="model.norm.weight"):
            await ask(served, "refused")
        await served.push(3)
        return health, await ask(served, "served")

    health, completion = run(scenario())
    assert health.status == "stale" and health.version is None and "model.norm.weight" in health.reason
    assert completion.spans == spans_of((3, 12))


@OF_EVERY_FAMILY
def test_a_wrong_digest_makes_the_server_stale_and_ends_what_was_running(run, served):
    async def scenario():
        task = ask(served, "held", max_tokens=served.long)
        await running(served, task)
        await served.engine.pause("keep")
        with pytest.raises(WeightError, match=r"model\.norm\.weight.*digest"):
            await served.push(2, damaged="model.norm.weight")
        health = await served.engine.health()
        with pytest.raises(EngineError, match="digest"):
            await task
        await served.engine.resume()
        with pytest.raises(EngineError, match="digest"):
            await ask(served, "refused")
        return health

    health = run(scenario())
    assert health.status == "stale" and health.version is None and health.num_running == 0


@OF_EVERY_FAMILY
def test_a_push_that_brings_only_some_tensors_cannot_finish(run, served):
    async def scenario():
        await served.engine.begin(manifest_of(served, version=2))
        with pytest.raises(WeightError, match="incomplete"):
            await served.engine.finish(2, "b")
        return await served.engine.health()

    assert run(scenario()).status == "stale"


@OF_EVERY_FAMILY
def test_a_server_that_drops_its_weights_serves_what_the_next_push_brings(run, served):
    async def scenario():
        before = await ask(served, "before")
        await served.engine.sleep()
        with pytest.raises(EngineError, match="stale: its weights were given up with the GPU's memory"):
            await ask(served, "asleep")
        await served.engine.wake()
        with pytest.raises(EngineError, match="stale: its weights were given up with the GPU's memory"):
            await ask(served, "without weights")
        await served.push(1)
        return before, await ask(served, "after")

    before, after = run(scenario())
    assert_prefix(before, after)
    assert after.spans == before.spans


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        (PROMPT, dict(max_tokens=630), r"11 tokens .* max_tokens = 630: must be at most model.max_context = (256|640);"),
        ((), dict(), "at least one token"),
        ((5, 61), dict(), r"token 61 is outside the model's vocabulary \[0, 61\)"),
        (PROMPT, dict(max_tokens=0), "max_tokens = 0"),
        (PROMPT, dict(seed=-1), "seed = -1"),
        (PROMPT, dict(temperature=-0.5), "temperature = -0.5"),
        (PROMPT, dict(top_p=0.0), "top_p = 0.0"),
        (PROMPT, dict(top_k=-1), "top_k = -1"),
    ],
)
def test_a_request_that_breaks_a_rule_is_refused(run, served, prompt, sampling, message):
    async def scenario():
        with pytest.raises(EngineError, match=message):
            await ask(served, "wrong", prompt=prompt, **sampling)
        return await ask(served, "right")

    assert run(scenario()).finish_reason == "length"


def test_the_newer_of_two_requests_of_one_id_is_answered(run, served):
    """Whoever asked for the older one has lost its connection, or is about to drop it."""

    async def scenario():
        older = ask(served, "same", max_tokens=served.long)
        await running(served, older)
        newer = await ask(served, "same")
        return newer, await older

    newer, older = run(scenario())
    assert (newer.finish_reason, older.finish_reason) == ("length", "abort")


def test_a_cancelled_request_frees_its_slot(run, served):
    async def scenario():
        task = ask(served, "gone", max_tokens=served.long)
        await running(served, task)
        task.cancel()
        await asyncio.wait([task])
        await until(served.engine, lambda health: health.num_running == 0)
        return await ask(served, "gone")

    assert run(scenario()).finish_reason == "length"


@pytest.mark.parametrize("way", ["cancelled", "aborted"])
def test_the_id_of_a_request_that_is_given_up_is_free_while_the_engine_still_has_it(run, way):
    """A group that was put off may begin anew before the hold ends in which it was."""

    async def scenario():
        core = FakeCore(Limits(max_context=64, vocab_size=64), {})
        core.version = 1
        state = ServerState(core, max_running=2, version=1)
        sampling = SamplingParams(max_tokens=30, seed=7)
        first = asyncio.create_task(state.generate(PROMPT, sampling, "again"))
        await asyncio.sleep(0)
        await state.pause("keep")
        if way == "cancelled":
            first.cancel()
            await asyncio.wait([first])
        else:
            ending = asyncio.create_task(state.abort(("again",)))
            await asyncio.sleep(0)
        second = asyncio.create_task(state.generate(PROMPT, sampling, "again"))
        await asyncio.sleep(0)
        assert (await state.health()).num_running == 1, "its slot is taken until the engine lets go"
        await state.resume()
        completion = await second
        if way == "aborted":
            await ending
            ended = await first
            assert (ended.request_id, ended.finish_reason) == ("again", "abort")
        await state.close()
        return completion

    completion = run(scenario())
    assert (completion.request_id, completion.finish_reason) == ("again", "length")


@pytest.mark.parametrize("served", family_servers.PARAMS, indirect=True)
def test_log_probs_and_routes_of_every_other_family_follow_a_push(run, request, served, checkpoints):
    """Also after one that was refused."""
    engine, name = request.node.callspec.params["served"].split("-")
    directory, damaged = checkpoints[name].directory, max(served.tensors)
    shape = shape_of_config(read_config(directory)).routes if engine == "sglang" else None
    prompts = (PROMPT, PROMPT[:4], (1,))

    async def scenario():
        with pytest.raises(WeightError, match=f"{re.escape(damaged)}.*digest"):
            await served.push(2, scale=1.05, damaged=damaged)
        await served.push(3, scale=1.05)
        return [await ask(served, f"r{i}", prompt=each, returns_routes=shape is not None) for i, each in enumerate(prompts)]

    completions = run(scenario())
    model = AutoModelForCausalLM.from_pretrained(directory, config=read_transformers_config(directory), dtype=torch.float32).eval()
    views = checkpoint_views(model)
    for tensor_name, tensor in served.tensors.items():
        views[tensor_name].copy_(tensor * 1.05)
    recorder = None if shape is None else RouteRecorder(model, shape)
    for prompt, completion in zip(prompts, completions, strict=True):
        tokens = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.no_grad(), nullcontext() if recorder is None else recorder.recording() as chosen:
            logits = model(tokens[:, :-1]).logits[0, len(prompt) - 1 :]
        expected = logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])[:, 0]
        assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-5)
        if recorder is not None:
            assert np.array_equal(np.sort(completion.routes, axis=-1), np.sort(recorder.table(chosen, 1)[0], axis=-1))
