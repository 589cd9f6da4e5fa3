"""Whole runs inside the test process: other layouts, transports, algorithms and starts, and what a run refuses to continue."""

import fcntl
import math
import shutil
import socket
import sys

import pytest
import torch
from safetensors.torch import load_file
from whole_runs import ADD, ASYNC, DIGIT, SMALL, SYNC, checkpoint_tensors, train

from moerl.__main__ import main
from moerl.train.checkpoint.checkpoint_dirs import newest
from moerl.types.errors import CheckpointError, EngineError, MoerlError

pytestmark = [pytest.mark.matrix, pytest.mark.usefixtures("shared_ray", "nothing_left")]  # whole runs beyond what `make test` has time for

TP_GLOO = (
    "num_steps=2", "train.layout.ep=1", "train.layout.tp=2", "train.layout.etp=2", "train.updates_per_step=2", "weights.transport=nccl",
    DIGIT,
)  # fmt: skip
WARM = ("sft.num_steps=4", "sft.batch_size=16")


@pytest.fixture(scope="module")
def tp_gloo(tmp_path_factory):
    """The directory of a run of two steps, and its rows."""
    output_dir = tmp_path_factory.mktemp("tp-gloo")
    return output_dir, train(output_dir, *TP_GLOO)


@pytest.fixture
def copied(tp_gloo, tmp_path):
    """The same run, to be changed."""
    shutil.copytree(tp_gloo[0], tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.matrix("tp_gloo")
def test_tensor_parallel_ranks_push_over_gloo_and_take_two_updates_per_step(tp_gloo):
    rows = tp_gloo[1]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(0 < row["train/kl_old"] < 0.1 for row in rows)  # the second update's; the guard of the first step wants 0 of the first
    assert all(row["mismatch/mean"] < 1e-6 for row in rows)
    assert all(math.isfinite(row["train/loss"]) and row["train/grad_norm"] > 0 for row in rows)


def test_a_deepseek_model_trains_its_multi_token_prediction_and_its_biases(tmp_path):
    family = ("model.scratch.family=deepseek_v3", "train.mtp_loss=0.1", "train.megatron.moe_router_bias_update_rate=0.001")
    rows = train(tmp_path, *family, "num_steps=2", DIGIT)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["train/kl_old"] == 0.0 and row["mismatch/mean"] < 1e-6 for row in rows)
    assert rows[1]["train/mtp_loss"] < rows[0]["train/mtp_loss"]


@pytest.mark.parametrize("mode", ["trainer", "rollout"])
def test_routes_are_replayed_in_both_updates_of_a_step(tmp_path, mode):
    """In the first the router would have chosen the same: its weights are those that chose."""
    rows = train(tmp_path, f"train.router_replay={mode}", "train.updates_per_step=2", "num_steps=2", DIGIT)
    assert all(row["mismatch/mean"] < 1e-6 for row in rows)
    assert all(row["routing/replayed"] > (0.999 if mode == "trainer" else 0.8) for row in rows)
    assert all(0.9 < row["routing/overlap"] <= 1 for row in rows)
    assert all(("routing/payload_bytes" in row) == (mode == "rollout") for row in rows)


def test_a_run_pushes_through_files_and_leaves_none(tmp_path):
    """The second and third push are deltas."""
    rows = train(tmp_path, "weights.transport=disk", "weights.canary_every=1", "num_steps=2", DIGIT)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["mismatch/mean"] < 1e-6 and row["train/grad_norm"] > 0 for row in rows)
    assert list((tmp_path / SYNC / "push").glob("push-*")) == []


def test_servers_in_fp8_get_what_the_ranks_made_of_their_shards_and_it_shows_in_log_probs(tmp_path):
    """Tensor parallel, so that ranks share blocks; from the second push on deltas of values and scales."""
    shards = ("train.layout.ep=1", "train.layout.tp=2", "train.layout.etp=2", "weights.transport=disk", "weights.canary_every=1")
    rows = train(tmp_path, *shards, "rollout.layout.weights=fp8", "weights.mismatch_limit=0.05", "num_steps=2", DIGIT)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(1e-6 < row["mismatch/mean"] < 0.05 and row["train/grad_norm"] > 0 for row in rows)


# -- what cannot be continued ----------------------------------------------------------------------------------


@pytest.mark.matrix("tp_gloo")
def test_another_seed_model_or_group_is_refused_with_exit_code_2_and_every_field(copied, monkeypatch, capsys):
    overrides = [*SMALL, *TP_GLOO, "seed=1", "model.scratch.num_layers=3", "group_size=8"]
    monkeypatch.setattr(sys, "argv", ["moerl", "train", f"recipe={SYNC}", f"output_dir={copied}", *overrides])
    before = (copied / SYNC / "config.yaml").read_text()
    with pytest.raises(SystemExit) as exited:
        main()
    assert exited.value.code == 2
    message = capsys.readouterr().err
    assert "3 problems in the configuration" in message
    for line in ("seed = 1: was 0 and", "model.scratch.num_layers = 3: was 2 and", "group_size = 8: was 4 and"):
        assert line in message
    assert (copied / SYNC / "config.yaml").read_text() == before


@pytest.mark.matrix("tp_gloo")
def test_a_run_continues_under_another_layout_and_dtype(copied):
    """From tensor parallel float32 on two ranks: first to pipeline parallel, then to one rank in bfloat16."""
    layout = ("train.layout.tp=1", "train.layout.etp=1")
    rows = train(copied, *TP_GLOO, *layout, "train.layout.pp=2", "num_steps=3")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[-1]["mismatch/mean"] < 1e-6
    one = (*layout, "train.layout.ranks=1", "train.dtype=bfloat16", "weights.mismatch_limit=0.03", "rollout.dtype=bfloat16")
    rows = train(copied, *TP_GLOO, *one, "num_steps=4")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[-1]["mismatch/mean"] < 0.03


@pytest.mark.matrix("tp_gloo")
def test_a_second_process_on_the_same_run_is_refused(copied):
    with (copied / SYNC / ".lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(MoerlError, match=rf"{SYNC}: another process is training this run; wait for it, or choose another name="):
            train(copied, *TP_GLOO)


@pytest.mark.matrix("tp_gloo")
def test_a_damaged_shard_is_named_with_its_tensors_and_stops_every_process(copied):
    directory = newest(copied / SYNC / "checkpoints")
    shard = max(directory.glob("__1_*.distcp"))
    contents = bytearray(shard.read_bytes())
    contents[len(contents) // 2] ^= 1
    shard.write_bytes(contents)
    with pytest.raises(CheckpointError, match=rf"(?s)delete {directory} .*\n\* {shard.name}: contents differ.*; holds \w+"):
        train(copied, *TP_GLOO, "num_steps=3")


def test_a_port_in_use_is_named_and_stops_every_process(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EngineError, match=rf"rollout\.port = {port}: port is in use"):
            train(tmp_path, f"rollout.port={port}")


# -- other starts ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dapo(tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("dapo")
    return output_dir, train(output_dir, *WARM, "num_steps=4", "group_size=8", "save_every=0", recipe=ASYNC)


@pytest.mark.matrix("dapo")
def test_dapo_trains_on_samples_at_most_one_step_old(dapo):
    rows = dapo[1]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert max(row["staleness/max"] for row in rows) == 1
    assert rows[0]["staleness/max"] == 0
    assert rows[0]["mismatch/mean"] < 1e-6
    assert sum(row["groups/dropped"] for row in rows) > 0
    assert all(row["groups/uniform"] == 0 for row in rows)


@pytest.mark.matrix("dapo")
def test_a_continued_run_skips_the_warm_start(dapo, capsys):
    output_dir, before = dapo
    weights = list((output_dir / ASYNC / "warm_start").glob("*.safetensors"))
    written = [path.stat().st_mtime_ns for path in weights]
    assert written
    after = train(output_dir, *WARM, "num_steps=5", "group_size=8", "save_every=0", recipe=ASYNC)
    assert after[:4] == before
    assert len(after) == 5
    assert [path.stat().st_mtime_ns for path in weights] == written
    assert "warm start" not in capsys.readouterr().out


def hf_tensors(directory):
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_grpo_starts_from_the_weights_of_the_warm_start(tmp_path, capsys):
    """With a learning rate too small to change a float32, so that the checkpoint holds what the first step started from: weights as they
    were trained, whatever servers hold."""
    constant = ("train.optimizer.lr=1e-30", "train.optimizer.warmup_steps=0", "algorithm.kl_coefficient=0.1")
    served = ("rollout.dtype=bfloat16", "weights.mismatch_limit=0.1")
    first = train(tmp_path, *WARM, *constant, *served, "num_steps=1", recipe=ADD)[0]
    assert "warm start 4/4: loss" in capsys.readouterr().out
    assert first["train/kl_reference"] == 0.0
    names = {"embedding.word_embeddings.weight": "model.embed_tokens.weight", "decoder.final_layernorm.weight": "model.norm.weight"}
    model, warm = (hf_tensors(tmp_path / ADD / name) for name in ("model", "warm_start"))
    trained = checkpoint_tensors(tmp_path / ADD)
    assert {tensor.dtype for tensor in warm.values()} == {torch.float32}
    for ours, theirs in names.items():
        assert trained[ours] == warm[theirs].numpy().tobytes()
        assert trained[ours] != model[theirs].numpy().tobytes()


# -- algorithms ------------------------------------------------------------------------------------------------


def test_trainer_and_server_agree_on_what_top_p_left_and_differ_by_what_it_left_out_without(tmp_path):
    """By -log of the probability that was kept: 0.05 for top_p=0.95 where nothing has been learned."""
    filtered = ("num_steps=2", "rollout.top_p=0.95", "algorithm.kl_coefficient=0.1")
    assert max(row["mismatch/max"] for row in train(tmp_path / "replayed", *filtered)) < 1e-5
    whole = train(tmp_path / "whole", *filtered, "train.sampling_replay=off", "weights.mismatch_limit=1")
    assert all(0.04 < row["mismatch/mean"] < 0.052 for row in whole)


def test_parts_of_a_users_file_train_on_ranks_that_need_not_have_it(tmp_path, monkeypatch):
    """An advantage by tokens, an objective and a correction, each with what the one before it left."""
    parts = tmp_path / "parts"
    parts.mkdir()
    (parts / "later.py").write_text("QUARTER = 0.25\n")
    (parts / "own.py").write_text(
        "from dataclasses import dataclass\n\nimport torch\n\n"
        "from moerl.algorithms.advantages import Credit\nfrom moerl.algorithms.columns import TokenLoss, Weights\n\n\n"
        "@dataclass(frozen=True)\nclass ByToken:\n    needs = {'tokens'}\n\n"
        "    def __call__(self, step):\n        odd_N = step.tokens.token_ids_N % 2\n"
        "        return Credit(advantages_N=1 + odd_N + step.tokens.rollout_N * 0)\n\n\n"
        "@dataclass(frozen=True)\nclass Own:\n    scale: float\n    metric_names = ('one', 'credit')\n\n"
        "    def token_loss(self, columns):\n        loss_T = -self.scale * columns.advantage_T * columns.log_ratio_T().exp()\n"
        "        one_T = torch.ones_like(loss_T)\n"
        "        metrics = {'one': one_T, 'credit': columns.advantage_T}\n"
        "        return TokenLoss(loss_T=loss_T, clipped_T=torch.zeros_like(columns.mask_T), metrics=metrics)\n\n\n"
        "@dataclass(frozen=True)\nclass Quarter:\n    needs = {'old_logprobs'}\n\n"
        "    def weights(self, columns):\n        from later import QUARTER\n\n"
        "        return Weights(weight_T=torch.full_like(columns.logp_T, QUARTER), is_bounded_T=columns.sums_T(columns.logp_T) < 0)\n"
    )
    monkeypatch.chdir(tmp_path)
    objective = "{kind: custom, path: parts/own.py:Own, settings: {scale: 2.0}}"
    others = ("~algorithm.advantage", "+algorithm.advantage={kind: custom, path: 'parts/own.py:ByToken'}")
    corrections = "algorithm.corrections=[{kind: custom, path: 'parts/own.py:Quarter'}]"
    rows = train(tmp_path, "num_steps=1", DIGIT, *others, corrections, "~algorithm.objective", f"+algorithm.objective={objective}")
    assert rows[0]["objective/one"] == 1
    assert 1 < rows[0]["objective/credit"] < 2
    assert rows[0]["train/loss"] == pytest.approx(-2 * 0.25 * rows[0]["objective/credit"], rel=1e-5)
    assert rows[0]["correction/weight"] == 0.25 and rows[0]["correction/bounded"] == 1


def test_remax_draws_one_more_completion_of_every_prompt(tmp_path):
    rows = train(tmp_path, "num_steps=2", DIGIT, "algorithm=remax")
    assert all(row["train/grad_norm"] > 0 for row in rows)
    assert rows[0]["tokens/trained"] == rows[0]["tokens/response"]


def test_an_adaptive_kl_goes_on_where_the_checkpoint_left_it(tmp_path):
    adaptive = ("algorithm.kl_coefficient=0.1", "algorithm.kl_target=0.001", "algorithm.kl_horizon=100", "save_every=1")
    whole = [row["train/kl_coefficient"] for row in train(tmp_path / "whole", *adaptive, "num_steps=3")]
    train(tmp_path / "parts", *adaptive, "num_steps=2")
    assert [row["train/kl_coefficient"] for row in train(tmp_path / "parts", *adaptive, "num_steps=3")] == whole
    assert whole[0] == 0.1 and len(set(whole)) == 3


@pytest.mark.parametrize("name", ["gspo", "reinforce_pp", "rloo"])
def test_an_algorithm_learns(name, tmp_path):
    """To begin with a digit. `make learn` has all of them, on the demo's own task."""
    small = ("groups_per_step=16", "group_size=8", "rollout.max_running=128", "train.layout.ranks=1", "train.layout.ep=1", "save_every=0")
    lr = ("train.optimizer.lr=0.006", "train.optimizer.warmup_steps=5")
    first = 'reward.terms.repeat={kind: format, pattern: "[0-9].*"}'
    rewards = [row["reward/mean"] for row in train(tmp_path, *small, *lr, first, "num_steps=40", f"algorithm={name}")]
    assert max(rewards[:3]) < 0.15
    assert min(rewards[-3:]) > 0.6
