"""Servers that draft with the model's layer of multi-token prediction: pushes bring it, and what comes out is the model's."""

import asyncio
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from family_servers import write_family
from safetensors.torch import load_file
from tiny_servers import MAX_RUNNING, Tensors, native_config, push
from transformers import AutoModelForCausalLM, PreTrainedModel

from moerl.cluster.run_secret import RunSecret
from moerl.config.schema.rollout_config import ServerLayout
from moerl.rollout.build_engines import build_engines
from moerl.rollout.engines.hf.forward import RouteRecorder
from moerl.rollout.engines.hf.hf_model import checkpoint_specs, checkpoint_views
from moerl.rollout.server.client import HTTPEngine
from moerl.types.completion import DraftCounts, SamplingParams
from moerl.types.errors import WeightError
from moerl.types.routes import RouteShape

DRAFTS = 3
PROMPTS = [(5, 17, 3, 3, 42, 8), (5, 17, 3, 9), (1,), (20, 4)]
KINDS = [
    pytest.param("sglang-deepseek_v3", marks=pytest.mark.matrix(turn=1)),
    pytest.param("vllm-deepseek_v3", marks=pytest.mark.matrix(turn=0)),
    pytest.param("sglang-glm4_moe", marks=pytest.mark.matrix("sglang-glm4_moe")),  # caches keys and values of heads
    pytest.param("vllm-glm4_moe", marks=pytest.mark.matrix("vllm-glm4_moe")),
]

pytestmark = pytest.mark.engine


@dataclass(frozen=True, kw_only=True)
class Drafting:
    engine: HTTPEngine
    model: PreTrainedModel
    tensors: Tensors
    """Of a push: the checkpoint's, without copies of the embedding and the output layer."""
    returns_routes: bool


@pytest.fixture(scope="module", params=KINDS)
def drafting(request, run, tmp_path_factory):
    (name, family), root = request.param.split("-"), tmp_path_factory.mktemp(request.param)
    checkpoint = write_family(family, root, num_nextn_predict_layers=1)
    config = native_config(request.param, checkpoint, layout=ServerLayout(mtp_tokens=DRAFTS))
    config = replace(config, train=replace(config.train, mtp_loss=0.1))
    (engine,) = build_engines(config, checkpoint.directory, root, RunSecret.new())
    stored = load_file(checkpoint.directory / "model.safetensors")
    tensors = {name: stored[name] for name in checkpoint_specs(checkpoint.directory, torch.float32, with_mtp=True)}
    model = AutoModelForCausalLM.from_pretrained(checkpoint.directory).eval()
    try:
        run(engine.start())
        yield Drafting(engine=engine, model=model, tensors=tensors, returns_routes=name == "sglang")
    finally:
        run(engine.close())


async def complete(drafting, tensors, version, **sampling):
    """Completions of all PROMPTS, at the same time."""
    await drafting.engine.resume()
    await push(drafting.engine, tensors, version)
    asked = SamplingParams(max_tokens=60, seed=4, returns_routes=drafting.returns_routes, **sampling)
    calls = (drafting.engine.generate(prompt, replace(asked, seed=4 + i), f"{version}-{i}") for i, prompt in enumerate(PROMPTS))
    return await asyncio.gather(*calls)


def distributions(model, prompt, completion, temperature):
    """float [tokens, vocabulary]: log-probs of a forward over all of them."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion.token_ids]])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tokens_have_the_models_log_probs_and_are_drawn_by_them(run, drafting, temperature):
    """Several requests in a batch, each with its drafts. The surprise of what was drawn is that of the model's distribution on average."""
    assert len(PROMPTS) <= MAX_RUNNING
    excess, variance = 0.0, 0.0
    for prompt, completion in zip(PROMPTS, run(complete(drafting, drafting.tensors, 1, temperature=temperature)), strict=True):
        logprobs = distributions(drafting.model, prompt, completion, temperature)
        expected = logprobs[torch.arange(60), torch.tensor(completion.token_ids)]
        np.testing.assert_allclose(completion.logprobs, expected, atol=5e-5)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        variance += float(((logprobs.exp() * logprobs**2).sum(-1) - entropy**2).sum())
        excess += float((expected + entropy).sum())
        assert completion.drafts.checks > 0
    assert abs(excess) < 4 * variance**0.5


def test_what_is_drafted_is_of_the_pushed_layer(run, drafting):
    """Of a model that looks at the last token alone the layer knows the next token, and each pass gives all that it can; but for the first
    position of a prompt, where vLLM gives it no token. The tensors of the checkpoint, pushed after it, are random again."""
    for completion in run(complete(drafting, clairvoyant(drafting.tensors), 2, temperature=0.0)):
        assert completion.drafts.accepted >= DRAFTS * (completion.drafts.checks - 2)
    drafts = sum((each.drafts for each in run(complete(drafting, drafting.tensors, 3))), DraftCounts())
    assert drafts.accepted < 0.3 * drafts.checks


def clairvoyant(tensors):
    """Layers add nothing to the embedding of the last token, and the drafting one takes that of the token it is given."""
    silent = ("self_attn.o_proj.weight", "down_proj.weight")
    changed = {name: tensor * (not name.endswith(silent)) for name, tensor in tensors.items()}
    (joins,) = (name for name in tensors if name.endswith("eh_proj.weight"))
    hidden = len(tensors[joins])
    changed[joins] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    (last,) = (name for name in tensors if name.endswith("shared_head.norm.weight"))
    changed[last] = tensors["model.norm.weight"]
    (token,) = (name for name in tensors if name.endswith("enorm.weight"))
    return changed | {token: torch.ones(hidden)}


def test_routes_come_beside_drafts(run, drafting):
    """One of every token that was computed, whether it had been drafted or not."""
    if not drafting.returns_routes:
        pytest.skip("this engine returns no routes")
    config = drafting.model.config
    shape = RouteShape(num_layers=1, top_k=config.num_experts_per_tok, num_experts=config.n_routed_experts)
    recorder = RouteRecorder(drafting.model, shape)
    for tensors, version in ((drafting.tensors, 4), (clairvoyant(drafting.tensors), 5)):
        load(drafting.model, tensors)
        for prompt, completion in zip(PROMPTS, run(complete(drafting, tensors, version)), strict=True):
            with torch.no_grad(), recorder.recording() as chosen:
                drafting.model(torch.tensor([[*prompt, *completion.token_ids[:-1]]]))
            expected = recorder.table(chosen, 1)[0]
            assert completion.routes.shape == expected.shape
            assert np.array_equal(np.sort(completion.routes, axis=-1), np.sort(expected, axis=-1))
    load(drafting.model, drafting.tensors)


def load(model, tensors):
    for name, view in checkpoint_views(model).items():
        view.copy_(tensors[name])


def test_a_push_without_the_layer_is_refused_with_its_names(run, drafting):
    without = {name: tensor for name, tensor in drafting.tensors.items() if "layers.2." not in name}
    with pytest.raises(WeightError, match=r"model\.layers\.2\."):
        run(push(drafting.engine, without, 6))
