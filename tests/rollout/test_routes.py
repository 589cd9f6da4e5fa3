"""Routes of completions: what an engine returns, what goes over the wire, and what is refused."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_contract import PROMPT, ask, running
from tiny_servers import ROUTES
from transformers import AutoModelForCausalLM

from moerl.rollout.engines.hf.forward import Forward
from moerl.rollout.engines.hf.hf_model import load_model
from moerl.rollout.engines.hf.scheduler import Scheduler, SlotRequest
from moerl.rollout.fleet.completion_check import check_routes
from moerl.rollout.server import wire
from moerl.types.completion import Completion, SamplingParams, VersionSpan
from moerl.types.errors import EngineError
from moerl.types.routes import RouteShape, is_unknown


@pytest.fixture
def kind(request):
    """Of the engine `served`."""
    return request.node.callspec.params["served"]


# -- the contract --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("served", ["fake", "moe"], indirect=True)
def test_a_completion_has_the_routes_of_every_computed_token_if_they_are_asked_for(run, served, kind):
    async def scenario():
        return await asyncio.gather(ask(served, "with", returns_routes=True), ask(served, "without"))

    with_routes, without = run(scenario())
    check_routes(with_routes, num_prompt=len(PROMPT), shape=ROUTES[kind])
    assert with_routes.routes.shape[0] == len(PROMPT) + 12 - 1
    assert without.routes is None
    assert with_routes.token_ids == without.token_ids
    if kind == "fake":
        assert with_routes.routes.max() > 255  # more experts than a byte holds


@pytest.mark.parametrize("served", ["fake", "moe"], indirect=True)
def test_an_aborted_completion_has_the_routes_of_its_tokens(run, served, kind):
    async def scenario():
        whole = ask(served, "whole", max_tokens=served.long, returns_routes=True)
        cut = ask(served, "cut", max_tokens=served.long, returns_routes=True)
        await running(served, whole, cut)
        await ask(served, "other", max_tokens=3)
        await served.engine.abort(("cut",))
        return await whole, await cut

    whole, cut = run(scenario())
    assert 0 < len(cut.token_ids) < served.long
    check_routes(cut, num_prompt=len(PROMPT), shape=ROUTES[kind])
    np.testing.assert_array_equal(cut.routes, whole.routes[: len(cut.routes)])


@pytest.mark.parametrize("served", ["dense"], indirect=True)
def test_a_dense_model_refuses_to_return_routes(run, served):
    async def scenario():
        with pytest.raises(EngineError, match="returns_routes: needs a model with experts"):
            await ask(served, "a", returns_routes=True)
        return await ask(served, "b")

    assert run(scenario()).routes is None


# -- the hf engine -------------------------------------------------------------------------------------------------


class Batch:
    """A scheduler without server."""

    def __init__(self, directory, *, deterministic):
        options = dict(deterministic=deterministic, max_context=256)
        model = load_model(directory, dtype=torch.float32, load="checkpoint", **options)
        self.forward = Forward(model, num_slots=6, prefill_chunk=8, **options)

    def complete(self, requests, aborts=None):
        """`requests`: name -> (prompt, sampling). `aborts`: iteration -> names."""
        scheduler, outcomes, iteration = Scheduler(self.forward, max_context=256), {}, 0
        for name, (prompt, sampling) in requests.items():
            done = lambda outcome, name=name: outcomes.__setitem__(name, outcome)  # noqa: E731
            scheduler.add([SlotRequest(key=name, prompt_ids=np.array(prompt), sampling=sampling, done=done)])
        while scheduler.has_work:
            scheduler.step(1)
            iteration += 1
            for name in () if aborts is None else aborts.get(iteration, ()):
                scheduler.abort(name)
        return outcomes


@pytest.fixture(scope="module", params=["moe", "latent"])
def batch(request, checkpoints):
    torch.set_num_threads(1)
    directory = checkpoints[request.param].directory
    return {flag: Batch(directory, deterministic=flag) for flag in (True, False)}, AutoModelForCausalLM.from_pretrained(directory)


def prompt_of(length, seed):
    return tuple(np.random.default_rng(seed).integers(0, 61, size=length).tolist())


@torch.no_grad()
def whole_sequence_routes(model, tokens):
    """Sets of experts, sorted: [tokens, layers, top_k]."""
    chosen = []
    gates = [module for name, module in model.named_modules() if name.endswith(".mlp.gate")]
    hooks = [gate.register_forward_hook(lambda _, __, output: chosen.append(output[2])) for gate in gates]
    model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, dim=1).sort(-1).values.numpy()


@pytest.mark.parametrize("deterministic", [True, False])
def test_routes_are_those_of_the_whole_sequence_in_one_forward(batch, deterministic):
    """Prompts of several chunks, a group that shares one, more requests than slots, neighbours that do not ask."""
    batches, model = batch
    shared = prompt_of(21, 0)
    wanted = {f"group-{i}": (shared, SamplingParams(max_tokens=9 + i, seed=i, returns_routes=i != 1)) for i in range(3)}
    wanted |= {f"r{i}": (prompt_of(3 + 7 * i, i), SamplingParams(max_tokens=14, seed=i, returns_routes=i % 2 == 0)) for i in range(6)}
    outcomes = batches[deterministic].complete(wanted)
    for name, (prompt, sampling) in wanted.items():
        completion = outcomes[name]
        if not sampling.returns_routes:
            assert completion.routes is None
            continue
        expected = whole_sequence_routes(model, [*prompt, *completion.token_ids])[:-1]
        np.testing.assert_array_equal(np.sort(completion.routes, axis=-1), expected, err_msg=name)


def test_a_group_whose_first_request_is_aborted_in_its_prompt_keeps_the_routes_of_the_others(batch):
    batches, model = batch
    prompt = prompt_of(40, 3)
    requests = {name: (prompt, SamplingParams(max_tokens=5, seed=1, returns_routes=True)) for name in ("first", "second")}
    outcomes = batches[True].complete(requests, aborts={2: ("first",)})
    assert (outcomes["first"].token_ids, outcomes["first"].routes) == ((), None)
    expected = whole_sequence_routes(model, [*prompt, *outcomes["second"].token_ids])[:-1]
    np.testing.assert_array_equal(np.sort(outcomes["second"].routes, axis=-1), expected)


def test_a_model_that_is_not_asked_for_routes_has_no_hooks(batch, monkeypatch):
    batches, _ = batch
    monkeypatch.setattr(type(batches[True].forward._recorder), "recording", None)
    outcomes = batches[True].complete({"a": (prompt_of(9, 1), SamplingParams(max_tokens=5, seed=1))})
    assert len(outcomes["a"].token_ids) == 5
    assert not any(gate._forward_hooks for gate in batches[True].forward._recorder._gates)


# -- the wire ------------------------------------------------------------------------------------------------------


def completion_with(routes, num_tokens=3):
    return Completion(
        request_id="7-1\n",
        token_ids=(4,) * num_tokens,
        logprobs=(-0.5,) * num_tokens,
        spans=(VersionSpan(version=2, num_tokens=num_tokens),),
        finish_reason="stop",
        routes=routes,
    )


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_routes_cross_the_wire_as_they_are_and_take_their_own_bytes(dtype):
    routes = np.random.default_rng(0).integers(0, 250, size=(12, 3, 2)).astype(dtype)
    routes[0, 0] = 10  # a line break
    completion = completion_with(routes)
    content = wire.dump_completion(completion)
    again = wire.parse_completion(content)
    assert again == completion
    assert again.routes.dtype == dtype
    np.testing.assert_array_equal(again.routes, routes)
    assert len(content) - len(wire.dump_completion(completion_with(None))) < routes.nbytes + 40


def test_tokens_and_log_probs_cross_the_wire_as_their_bytes():
    head, _, tail = wire.dump_completion(completion_with(None)).partition(b"\n")
    assert json.loads(head)["num_tokens"] == 3
    assert tail == np.full(3, 4, dtype="<i4").tobytes() + np.full(3, -0.5, dtype="<f4").tobytes()
    assert wire.parse_completion(wire.dump_completion(completion_with(None))).routes is None


def test_an_answer_with_too_few_bytes_is_damaged():
    content = wire.dump_completion(completion_with(np.zeros((12, 3, 2), dtype=np.uint8)))
    with pytest.raises(ValueError, match="95 bytes of arrays, must be 96 for 3 tokens and routes uint8"):
        wire.parse_completion(content[:-1])


# -- what is refused -----------------------------------------------------------------------------------------------

SHAPE = RouteShape(num_layers=3, top_k=2, num_experts=8)
GOOD = np.tile(np.array([[1, 0], [7, 3], [2, 6]], dtype=np.uint8), (6, 1, 1))


def changed(token, layer, experts):
    routes = GOOD.copy()
    routes[token, layer] = experts
    return routes


@pytest.mark.parametrize("routes", [GOOD, changed(2, 1, [255, 255])])
def test_routes_of_the_model_pass(routes):
    check_routes(completion_with(routes), num_prompt=4, shape=SHAPE)


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (None, r"completion 7-1.*4 prompt and 3 response tokens = None: must be uint8 \(6, 3, 2\)"),
        (GOOD[:5], r"= uint8 \(5, 3, 2\): must be uint8 \(6, 3, 2\)"),
        (GOOD[:, :2], r"= uint8 \(6, 2, 2\): must be uint8 \(6, 3, 2\)"),
        (GOOD[..., :1], r"= uint8 \(6, 3, 1\): must be"),
        (GOOD.astype(np.uint16), r"= uint16 \(6, 3, 2\): must be uint8"),
        (changed(4, 2, [3, 8]), r"at token 4, layer 2 of those with experts = \[3, 8\]: must be experts below 8"),
        (changed(1, 0, [255, 3]), r"at token 1, layer 0 .* = \[255, 3\]: must be known or unknown as a whole"),
        (changed(5, 1, [3, 3]), r"at token 5, layer 1 .* = \[3, 3\]: must be different experts"),
    ],
)
def test_routes_of_another_model_are_refused_with_the_place(routes, message):
    with pytest.raises(EngineError, match=message):
        check_routes(replace(completion_with(routes), request_id="7-1"), num_prompt=4, shape=SHAPE)


@pytest.mark.parametrize(("top_k", "num_experts"), [(2, 8), (8, 256), (4, 512)])
def test_an_expert_that_comes_twice_is_found_wherever_it_is(top_k, num_experts):
    """Of more rows than are compared together."""
    generator = np.random.default_rng(top_k)
    shape = RouteShape(num_layers=60, top_k=top_k, num_experts=num_experts)
    routes = np.sort(generator.random((600, 60, num_experts), dtype=np.float32).argpartition(top_k, axis=-1)[..., :top_k], axis=-1)
    routes = generator.permuted(routes, axis=-1).astype(shape.dtype)
    completion = replace(completion_with(routes), token_ids=(0,) * 597)
    check_routes(completion, num_prompt=4, shape=shape)
    for token, layer in ((0, 0), (273, 4), (599, 59)):
        one, other = generator.choice(top_k, 2, replace=False)
        damaged = routes.copy()
        damaged[token, layer, one] = damaged[token, layer, other]
        with pytest.raises(EngineError, match=rf"at token {token}, layer {layer} of .*: must be different experts"):
            check_routes(replace(completion, routes=damaged), num_prompt=4, shape=shape)


@pytest.mark.parametrize(("top_k", "dtypes"), [(1, ["uint8", "uint16", "uint16"]), (8, ["uint8", "uint8", "uint16"])])
def test_a_byte_holds_255_experts_and_the_mark_of_the_unknown_and_256_that_differ(top_k, dtypes):
    assert [RouteShape(num_layers=1, top_k=top_k, num_experts=n).dtype for n in (255, 256, 257)] == dtypes


def test_among_256_experts_the_last_is_known_unless_it_stands_in_every_place():
    shape = replace(SHAPE, num_experts=256)
    routes = changed(1, 0, [255, 3])
    routes[2, 1] = 255
    check_routes(completion_with(routes), num_prompt=4, shape=shape)
    assert np.argwhere(is_unknown(routes)).tolist() == [[2, 1]]
    three = np.concatenate([routes, routes[..., :1]], axis=-1)  # the first expert comes twice
    three[..., 2] = 9
    three[5, 2] = [255, 255, 9]
    with pytest.raises(EngineError, match=r"at token 2, layer 1 of those with experts = \[255, 255, 9\]: must be different experts"):
        check_routes(completion_with(three), num_prompt=4, shape=replace(shape, top_k=3))
