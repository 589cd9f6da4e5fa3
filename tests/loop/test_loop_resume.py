"""A run that is stopped and started again trains the prompts that a run never stopped would have, each once."""

import asyncio
import json
from dataclasses import replace

import pytest
from fake_group import FakeTrainGroup
from in_process_run import InProcessRun, make_config, play

from moerl.config.algorithm_settings import algorithm
from moerl.train.checkpoint import checkpoint_dirs
from moerl.types.errors import CheckpointError, DataError

GRPO, DAPO = algorithm("grpo"), algorithm("dapo", "overlong=none", "max_attempts=50")


def play_until_saved(config, version, *, turns):
    """Cancels the run `turns` turns of the event loop after it saved `version`: while it draws, updates or pushes the next."""
    run = InProcessRun(config)
    saved = asyncio.Event()
    run.trainer.after_save = lambda saved_version: saved.set() if saved_version == version else None

    async def scenario():
        task = asyncio.create_task(run.play())
        await saved.wait()
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(scenario())
    return run


def interrupted(config, version, *, turns):
    """Of a run stopped soon after it saved `version`: what trained up to its newest checkpoint, and the run that continues it."""
    first = play_until_saved(config, version, turns=turns)
    newest = int(checkpoint_dirs.newest(config.run_dir / "checkpoints").name.removeprefix("step-"))
    resumed = play(config)
    assert version <= newest < min(resumed.groups)
    return {step: groups for step, groups in first.trained().items() if step <= newest}, resumed


@pytest.mark.parametrize("turns", [0, 3, 20])
@pytest.mark.parametrize(
    ("algorithm", "max_staleness"), [(GRPO, 0), (GRPO, 1), (GRPO, 2), (DAPO, 0)], ids=["grpo", "grpo-1", "grpo-2", "dapo"]
)
def test_a_stopped_run_trains_the_same_prompts_in_the_same_steps(tmp_path, algorithm, max_staleness, turns):
    config = make_config(tmp_path, num_steps=16, algorithm=algorithm, max_staleness=max_staleness)
    whole = play(replace(config, name="whole")).trained()
    before, resumed = interrupted(replace(config, name="stopped"), 6, turns=turns)
    assert before | resumed.trained() == whole


@pytest.mark.parametrize("turns", [0, 3, 20])
@pytest.mark.parametrize("max_staleness", [1, 2])
def test_a_stopped_dapo_run_with_staleness_trains_no_prompt_twice_and_skips_none_that_was_kept(tmp_path, max_staleness, turns):
    """Which groups are kept depends on the weights that sampled them, so the steps differ; the tickets still go on in order."""
    config = make_config(tmp_path, num_steps=16, algorithm=DAPO, max_staleness=max_staleness)
    before, resumed = interrupted(config, 6, turns=turns)
    trained = [ticket for tickets in (before | resumed.trained()).values() for ticket in tickets]
    assert len(trained) == 16 * config.groups_per_step
    assert trained == sorted(set(trained))
    drawn = [number for name, number in resumed.events if name == "drawn"]
    assert max(ticket for tickets in before.values() for ticket in tickets) < drawn[0]
    assert drawn == list(range(drawn[0], drawn[0] + len(drawn)))


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_resumed_run_samples_as_the_run_that_was_not_stopped(tmp_path, max_staleness):
    """Without staleness token for token; with it from the weights of the step before at the oldest."""
    config = make_config(tmp_path, num_steps=10, max_staleness=max_staleness)
    whole = play(replace(config, name="whole"))
    resumed = interrupted(replace(config, name="stopped"), 4, turns=5)[1]
    first = min(resumed.groups)
    assert resumed.versions(first) == {first - 1}
    if max_staleness == 0:
        assert resumed.groups == {version: groups for version, groups in whole.groups.items() if version >= first}


def test_the_records_of_steps_after_the_checkpoint_are_replaced(tmp_path):
    config = make_config(tmp_path, num_steps=10, save_every=4)
    play(replace(config, num_steps=6, save_every=4))
    (tmp_path / "loop" / "checkpoints" / "step-000006").rename(tmp_path / "aside")
    resumed = play(config)
    assert list(resumed.groups) == [5, 6, 7, 8, 9, 10]
    assert [row["step"] for row in resumed.metrics()] == list(range(1, 11))


def test_a_finished_run_that_is_started_again_changes_nothing(tmp_path):
    config = make_config(tmp_path)
    metrics = play(config).metrics()
    again = play(config)
    assert again.groups == {}
    assert again.metrics() == metrics


def test_a_run_with_a_larger_num_steps_goes_on(tmp_path):
    play(make_config(tmp_path, num_steps=2))
    longer = play(make_config(tmp_path, num_steps=5))
    assert longer.trained() == {3: [6, 7, 8], 4: [9, 10, 11], 5: [12, 13, 14]}


def test_a_run_begins_with_converted_weights_which_are_not_its_reference(tmp_path, monkeypatch):
    given = FakeTrainGroup.update

    async def update(self, batch, objective, *, lr):
        return replace(await given(self, batch, objective, lr=lr), kl_reference=1e-3)

    monkeypatch.setattr(FakeTrainGroup, "update", update)
    run = InProcessRun(make_config(tmp_path))
    run.trainer._write(0, 0, {"weights_only": True})
    asyncio.run(run.play())
    assert list(run.groups) == [1, 2, 3, 4]


def test_data_with_other_rows_than_the_checkpoint_was_made_with_is_refused(tmp_path):
    config = make_config(tmp_path)
    play(config)
    other = replace(config, num_steps=6, data=replace(config.data, size=24))
    with pytest.raises(DataError, match="the data has 24 usable rows, and had 25 when the checkpoint was saved"):
        play(other)


def test_a_checkpoint_whose_state_is_damaged_is_refused(tmp_path):
    config = make_config(tmp_path)
    play(config)
    state = checkpoint_dirs.newest(tmp_path / "loop" / "checkpoints") / "state.json"
    state.write_text(json.dumps({"version": 4, "drawn": 3, "num_rows": 25}))
    with pytest.raises(CheckpointError, match=r"(?s)delete .*step-000004 to continue from step-000003, .*\n.*state\.json: \d+ bytes"):
        play(replace(config, num_steps=6))
