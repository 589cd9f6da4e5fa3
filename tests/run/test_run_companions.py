"""Runs with models beside the policy: they learn, are saved and resumed, and sit on the policy's ranks or their own."""

import json
import math
import shutil

import pytest
from safetensors.torch import load_file, save_file
from whole_runs import DIGIT, SYNC, checkpoint_tensors, train

pytestmark = pytest.mark.usefixtures("shared_ray", "nothing_left")

PPO = (DIGIT, "algorithm=ppo", "critic.warmup_steps=1", "critic.optimizer={lr: 0.01}", "train.offload=all", "save_every=2", "num_steps=4")


@pytest.fixture(scope="module")
def ppo(tmp_path_factory):
    """Rows and folder of a run with a critic on the policy's ranks that go to sleep, never stopped."""
    directory = tmp_path_factory.mktemp("ppo")
    return train(directory, *PPO), directory / SYNC


def test_a_critic_learns_first_alone_then_beside_the_policy(ppo):
    rows, _ = ppo
    assert [row["train/lr"] > 0 for row in rows] == [False, True, True, True]
    assert all(row["companion/critic/grad_norm"] > 0 and row["companion/critic/lr"] == 0.01 for row in rows)
    assert rows[0]["critic/value"] == 0 and rows[-1]["critic/value"] != 0
    assert all(row["train/grad_norm"] > 0 for row in rows)


def test_a_critic_goes_on_bit_for_bit_where_the_checkpoint_left_it(ppo, tmp_path):
    rows, whole = ppo
    parts = tmp_path / SYNC
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoints" / "step-000004")
    lines = (parts / "metrics.jsonl").read_text().splitlines()
    (parts / "metrics.jsonl").write_text("\n".join(lines[:2]) + "\n")
    again = train(tmp_path, *PPO)
    told = [{name: row[name] for name in row if name.startswith(("critic/", "train/", "reward/"))} for row in (*rows[2:], *again[2:])]
    assert told[:2] == told[2:]
    for name in ("", "critic"):
        before, after = (checkpoint_tensors(run, name) for run in (whole, parts))
        assert before == after


@pytest.mark.matrix
def test_answers_are_judged_by_a_model_on_its_own_rank_and_compared_with_those_of_teachers_and_one_s_own(tmp_path):
    """Prompts of three sources: the teachers of two have the policy's initial weights, the policy itself sees no more than before in the
    third. Nothing is to be learned from any at first. The model goes on in a second run."""
    prompts = [
        {"prompt": [{"role": "user", "content": digit}], "data_source": source, "reward_model": {"ground_truth": truth}}
        for source, truth in (("taught", "1"), ("other", "2"), ("shown", ""))
        for digit in "0123456789"
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in prompts))
    train(tmp_path, "num_steps=1", DIGIT, name="teacher")
    model = tmp_path / "teacher" / "model"
    teachers = ", ".join(f"{name}: {{path: {model}, data_sources: [{source}]}}" for name, source in (("one", "taught"), ("two", "other")))
    prime = (
        DIGIT, "algorithm=prime", "outcome_model.layout={ranks: 1}", "outcome_model.optimizer={lr: 0.01}", "save_every=1",
        "~data", f"+data={{kind: files, files: [{file}], chat_template: false, max_prompt_tokens: 4}}",
        f"+distillation={{trains_rewards: true, shown: '{{answer}}', teachers: {{{teachers}}}}}",
    )  # fmt: skip
    rows = train(tmp_path, "num_steps=2", *prime, name="prime")
    assert all(0 < row["outcome_model/right"] < 1 for row in rows)
    assert rows[0]["outcome_model/loss"] == pytest.approx(math.log(2))
    assert all(row["companion/outcome_model/grad_norm"] > 0 for row in rows)
    assert abs(rows[0]["train/kl_teacher"]) < 1e-6 < abs(rows[1]["train/kl_teacher"])
    assert (tmp_path / "prime" / "logs" / "outcome_model-rank-0.log").exists()
    whole = train(tmp_path, "num_steps=3", *prime, name="whole")
    again = train(tmp_path, "num_steps=3", *prime, name="prime")
    told = [{name: row[name] for name in row if name.startswith(("outcome_model/", "train/", "reward/"))} for row in (whole[2], again[2])]
    assert told[0] == told[1] and told[0]["outcome_model/loss"] != rows[0]["outcome_model/loss"]
    before, after = (checkpoint_tensors(tmp_path / run, "outcome_model") for run in ("whole", "prime"))
    assert before == after


@pytest.mark.matrix
def test_a_policy_comes_near_its_teacher(tmp_path):
    """Whose likes and dislikes of tokens are strong."""
    train(tmp_path, "num_steps=1", "seed=3", name="teacher")
    model = tmp_path / "teacher" / "model"
    tensors = load_file(model / "model.safetensors")
    save_file(tensors | {"model.norm.weight": 5 * tensors["model.norm.weight"]}, model / "model.safetensors", metadata={"format": "pt"})
    taught = f"+distillation={{teachers: {{one: {{path: {model}}}}}}}"
    fast = ("num_steps=30", "train.optimizer.lr=0.01", "train.optimizer.warmup_steps=0", "save_every=0")
    many = ("groups_per_step=16", "group_size=8")  # a few samples tell the distance within a factor of two
    distances = [row["train/kl_teacher"] for row in train(tmp_path, taught, *fast, *many, name="pupil")]
    assert sum(distances[-6:]) < 0.85 * sum(distances[:6])
