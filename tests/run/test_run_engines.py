"""Whole runs whose samples come from SGLang or vLLM, in their own environments: verified pushes, replayed routes, killed servers."""

import json
import signal
import sys
from pathlib import Path
from statistics import fmean

import pytest
from whole_runs import DIGIT, SMALL, SYNC, assert_all_end, left_in_shared_memory, rows, shared_memory

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))

import family_servers

from moerl import run
from moerl.check import load_checked
from moerl.config.derive.scratch_config import TOKEN_IDS, VOCAB_SIZE
from moerl.scratch_model import character_tokenizer

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("shared_ray")]

NUM_STEPS = 3
COMMON = (
    "rollout.prefill_chunk=128", "deterministic=false", "save_every=0", f"num_steps={NUM_STEPS}", "weights.bucket_bytes=100000", DIGIT,
)  # fmt: skip
"""A push of half a megabyte has several buckets."""
ENGINES = {
    "sglang": ("rollout.engine=sglang", "train.router_replay=rollout", *COMMON),
    "vllm": ("rollout.engine=vllm", *COMMON),
}
"""vLLM returns no routes on CPU."""
TURN = {engine: pytest.mark.matrix(turn=turn) for turn, engine in enumerate(ENGINES)}
"""Whole runs of one engine with each change, which have the undisturbed one in common."""
FILES = {"sglang": "sgl", "vllm": "psm_"}
"""How the names of their files in /dev/shm begin; vLLM's are Python's."""
DENSE = ("llama", "qwen2", "qwen3")
OF_FAMILY = dict.fromkeys(DENSE, ("train.layout.ep=1", "train.router_replay=off")) | {
    "glm4_moe": ("train.mtp_loss=0.1",),
    "deepseek_v3": ("train.mtp_loss=0.1", "rollout.layout.mtp_tokens=2"),
}
FILTERED = {"sglang-qwen3": ("rollout.top_p=0.9", "rollout.top_k=20", "algorithm.kl_coefficient=0.1")}
"""Without replay of what sampling left of the vocabulary the mismatch would be over 0.1."""
BFLOAT16 = ("train.dtype=bfloat16", "weights.mismatch_limit=0.2", "groups_per_step=16", "model.scratch.num_layers=4")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The rows of a run in float32, by engine."""
    found = {}

    def rows_of(engine):
        if engine not in found:
            found[engine] = train_alone(tmp_path_factory.mktemp(engine), engine)
        return found[engine]

    return rows_of


def train(output_dir, engine, *overrides):
    run.train(load_checked([f"recipe={SYNC}", *SMALL, *ENGINES[engine], *overrides, f"output_dir={output_dir}"]))


def train_alone(output_dir, engine, *overrides):
    before = shared_memory()
    train(output_dir, engine, *overrides)
    assert left_in_shared_memory(before, FILES[engine]) == set()
    found = rows(output_dir)
    assert [row["step"] for row in found] == list(range(1, NUM_STEPS + 1))
    return found


def model_of(family, directory):
    """Overrides by which a run has a small model of the family."""
    folder = family_servers.write_family(family, directory, vocab_size=VOCAB_SIZE).directory
    character_tokenizer(64).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": TOKEN_IDS["<eos>"]}))
    return f"model.path={folder}", "model.scratch=null", "model.max_context=64"


BY_TURN = pytest.mark.parametrize("engine", [pytest.param(engine, marks=turn) for engine, turn in TURN.items()])


@BY_TURN
def test_after_every_push_the_engine_has_the_trainers_logprobs(undisturbed, engine):
    found = undisturbed(engine)
    assert all(row["mismatch/mean"] < 1e-6 and row["mismatch/max"] < 1e-5 for row in found)
    assert all(row["train/grad_norm"] > 0.1 for row in found)


@TURN["sglang"]
def test_sglangs_routes_are_the_trainers(undisturbed):
    assert all(row["routing/overlap"] == 1.0 and row["routing/replayed"] > 0.8 for row in undisturbed("sglang"))


@pytest.mark.matrix
@pytest.mark.parametrize("kind", family_servers.TRAINED)
def test_a_checkpoint_of_every_family_trains_with_the_engine(kind, tmp_path):
    engine, name = kind.split("-")
    model = model_of(name, tmp_path)
    found = train_alone(tmp_path / "out", engine, *model, *OF_FAMILY.get(name, ()), *FILTERED.get(kind, ()))
    assert all(row["mismatch/mean"] < 2e-6 and row["train/grad_norm"] > 0 for row in found)
    assert all(row["routing/overlap"] == 1.0 for row in found if engine == "sglang" and name not in DENSE)
    assert all(1 <= row["fleet/acceptance_length"] <= 3 for row in found if name == "deepseek_v3")


@BY_TURN
def test_an_engine_gets_bfloat16_of_a_family_whose_routers_it_holds_in_float32(engine, tmp_path):
    model = model_of("glm4_moe", tmp_path)
    found = train_alone(tmp_path / "out", engine, *model, "train.dtype=bfloat16", "weights.mismatch_limit=0.2")
    assert all(row["train/grad_norm"] > 0 for row in found)


@pytest.mark.matrix
def test_replay_narrows_the_mismatch_where_rounding_changes_routes(tmp_path):
    replayed = train_alone(tmp_path / "replayed", "sglang", *BFLOAT16)
    free = train_alone(tmp_path / "free", "sglang", *BFLOAT16, "train.router_replay=off")
    assert all(0.9 < row["routing/overlap"] < 1.0 for row in replayed)
    assert not any("routing/overlap" in row for row in free)
    assert fmean(row["mismatch/mean"] for row in replayed) <= fmean(row["mismatch/mean"] for row in free)


@pytest.mark.parametrize(
    ("engine", "when", "transport"),
    [
        pytest.param("sglang", "push", "nccl", marks=TURN["sglang"]),
        pytest.param("sglang", "generation", "ipc", marks=pytest.mark.matrix),
        pytest.param("vllm", "generation", "ipc", marks=TURN["vllm"]),
        pytest.param("vllm", "push", "nccl", marks=pytest.mark.matrix),
    ],
)
def test_a_killed_server_comes_back_with_verified_weights(undisturbed, tmp_path, strike, engine, when, transport):
    """kill -9 in the second step: the engine's own processes end with the server, and every step has its samples once."""
    struck, before = strike(when, signal.SIGKILL), shared_memory()
    train(tmp_path, engine, "deadlines.probe_seconds=5", f"weights.transport={transport}")
    found = rows(tmp_path)
    assert [row["step"] for row in found] == list(range(1, NUM_STEPS + 1))
    assert [row["tokens/response"] for row in found] == [row["tokens/response"] for row in undisturbed(engine)]
    assert all(row["mismatch/mean"] < 1e-6 for row in found)
    assert all(row["routing/overlap"] == 1.0 for row in found if engine == "sglang")
    assert (found[-1]["fleet/restarts"], struck.pools[0].fleet.members[0].num_starts) == (1.0, 2)
    assert len(struck.family) > 1, "the engine has processes of its own"
    assert_all_end(struck.family)
    assert left_in_shared_memory(before, FILES[engine]) == set()
