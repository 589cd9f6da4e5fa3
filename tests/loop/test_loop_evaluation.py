"""Evaluations while a run trains: when, of which weights, and that training goes on as if there were none."""

import asyncio
import json
import shutil
from dataclasses import replace

import pytest
from in_process_run import InProcessRun, make_config, new_engine, parity, play

from moerl.config.derive.model_configs import routes_to_replay
from moerl.config.schema.data_config import EvalConfig, EvalDataset, TinyData
from moerl.observe.report import write_report
from moerl.types.errors import RunStopped
from moerl.types.groups import Score

REPEAT = EvalDataset(data=TinyData(task="repeat", size=10, chat_template=False), samples=3, pass_at=(1, 3), num_prompts=6)
ADD = EvalDataset(data=TinyData(task="add", size=4, chat_template=False))
EVAL = EvalConfig(datasets={"repeat": REPEAT, "add": ADD}, every=2)
MEASURED = ("time/", "tokens/per_second", "checkpoint/", "memory/", "residency/", "push/", "eval/")


def trained_rows(run):
    """What was trained, without what a clock measured."""
    rows = [{name: value for name, value in row.items() if not name.startswith(MEASURED)} for row in run.metrics()]
    return [row for row in rows if row.keys() > {"step"}]


def evaluations(run):
    """Step -> what was measured."""
    found = {row["step"]: {name: value for name, value in row.items() if name.startswith("eval/")} for row in run.metrics()}
    return {step: metrics for step, metrics in found.items() if metrics}


def samples_of(run, step, name="repeat"):
    return [json.loads(line) for line in samples_file(run.config, step, name).read_text().splitlines()]


def samples_file(config, step, name="repeat"):
    return config.run_dir / "eval" / f"step-{step:06d}" / "samples" / f"{name}.jsonl"


def play_until_it_evaluates(config, step):
    """The run is asked to end when the first sample of that evaluation is scored."""
    begun = asyncio.Event()

    def score(prompt, text):
        if samples_file(config, step).exists():
            begun.set()
        return parity(prompt, text)

    run = InProcessRun(config, score=score)

    async def play_and_stop():
        task = asyncio.create_task(run.play())
        await begun.wait()
        run.stop.ask("enough")
        await asyncio.wait([task])
        assert isinstance(task.exception(), RunStopped)

    asyncio.run(play_and_stop())
    return run


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_training_is_the_same_with_and_without_evaluations(tmp_path, max_staleness):
    config = make_config(tmp_path, num_steps=5, max_staleness=max_staleness)
    plain, evaluated = play(replace(config, name="plain")), play(replace(config, name="evaluated", eval=EVAL))
    assert evaluated.trained() == plain.trained()
    if max_staleness == 0:  # above, which weights sample a group is a matter of time
        assert trained_rows(evaluated) == trained_rows(plain)
    assert list(evaluations(evaluated)) == [0, 2, 4, 5] and evaluations(plain) == {}


def test_a_run_that_has_trained_further_evaluates_nothing_under_an_earlier_step_and_keeps_its_rows(tmp_path):
    config = make_config(tmp_path, num_steps=4, eval=EVAL)
    rows = play(config).metrics()
    shorter = play(replace(config, num_steps=3))  # step 3 would be its last, and every second is evaluated
    assert shorter.metrics() == rows and 3 not in evaluations(shorter)


def test_every_prompt_is_asked_as_often_as_said_and_files_hold_every_sample(tmp_path):
    run = play(make_config(tmp_path, eval=EVAL))
    metrics = evaluations(run)[2]
    for name, prompts, samples in (("repeat", 6, 3), ("add", 4, 1)):
        records = samples_of(run, 2, name)
        assert [(record["prompt_index"], record["sample"]) for record in records] == [
            (p, s) for p in range(prompts) for s in range(samples)
        ]
        assert metrics[f"eval/{name}/pass@1"] == pytest.approx(sum(record["passed"] for record in records) / len(records))
        assert metrics[f"eval/{name}/reward"] == pytest.approx(sum(record["reward"] for record in records) / len(records))
    solved = [any(record["passed"] for record in samples_of(run, 2)[3 * p : 3 * p + 3]) for p in range(6)]
    assert metrics["eval/repeat/pass@3"] == pytest.approx(sum(solved) / 6)
    assert {record["response"] for record in samples_of(run, 2)} & {record["response"] for record in samples_of(run, 4)} == set()


def test_a_sample_that_cannot_be_scored_does_not_pass_and_is_counted(tmp_path):
    dataset = replace(REPEAT, pass_reward=0.0)
    config = make_config(tmp_path, num_steps=1, eval=EvalConfig(datasets={"repeat": dataset}, every=1))

    run = play(config, score=lambda prompt, text: Score(reward=0.0, error="broken" if len(text) % 2 else None))
    records = samples_of(run, 0)
    broken = [record for record in records if record["error"] is not None]
    assert 0 < len(broken) < len(records)
    assert [record["passed"] for record in records] == [record["error"] is None for record in records]
    assert evaluations(run)[0]["eval/repeat/errors"] == len(broken)


def test_a_run_that_goes_on_evaluates_what_was_not_evaluated_and_nothing_twice(tmp_path):
    config = make_config(tmp_path, num_steps=4, eval=EVAL, save_every=1)
    whole = play(replace(config, name="whole"))
    stopped = replace(config, name="stopped")
    first = play_until_it_evaluates(stopped, 2)
    assert list(evaluations(first)) == [0]
    # As of an earlier process that came to other weights.
    shutil.copy(samples_file(whole.config, 4), samples_file(stopped, 2))
    again = play(stopped)
    assert evaluations(again) == evaluations(whole)
    assert trained_rows(again) == trained_rows(whole)
    last = samples_file(stopped, 4)
    written = last.stat().st_mtime_ns
    assert evaluations(play(stopped)) == evaluations(whole)
    assert last.stat().st_mtime_ns == written, "a run that is over is not evaluated again"


def test_a_stop_during_an_evaluation_saves_the_step_before_it(tmp_path):
    config = make_config(tmp_path, num_steps=4, eval=EVAL, save_every=0)
    play_until_it_evaluates(config, 2)
    assert [path.name for path in (config.run_dir / "checkpoints").glob("step-*")] == ["step-000002"]


def test_an_evaluation_asks_for_no_routes_where_training_replays_them(tmp_path):
    config = make_config(tmp_path, num_steps=2, eval=EVAL)
    config = replace(config, train=replace(config.train, router_replay="rollout"))
    run = play(config, engines=[new_engine(routes=routes_to_replay(config))])
    assert list(evaluations(run)) == [0, 2]
    assert all(batch.routes_T is not None for batch in run.trainer.batches)


def test_the_report_opens_before_the_first_step_and_charts_evaluations(tmp_path):
    config = make_config(tmp_path, num_steps=2, eval=EVAL)
    run = play(config)
    assert "repeat/pass@3" in write_report(config.run_dir).read_text()
    lines = (config.run_dir / "metrics.jsonl").read_text().splitlines()
    (config.run_dir / "metrics.jsonl").write_text(lines[0] + "\n")
    assert list(evaluations(run)) == [0]
    assert write_report(config.run_dir).exists()
