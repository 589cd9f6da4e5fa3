"""Whatever breaks in a run ends it with that as the cause, before anything is trained or saved on top of it, and leaves no task."""

import asyncio
import socket
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from in_process_run import InProcessRun, RecordingTrainer, make_config, new_engine, parity

from moerl.config.derive.scratch_config import VOCAB_SIZE
from moerl.config.schema.data_config import RewardConfig, RewardTerm
from moerl.config.schema.deadlines import DeadlineConfig
from moerl.config.schema.rollout_config import RolloutConfig, WeightsConfig
from moerl.hangs.hang_reports import HangReports
from moerl.rewards.reward_pool import RewardPool
from moerl.rollout.engines.fake_engine import FakeEngine
from moerl.rollout.fleet import fleet
from moerl.server_trust import ServerTrust
from moerl.train.checkpoint import checkpoint_dirs
from moerl.types.errors import EngineError, GuardError, MoerlError, TrainError, WeightError
from moerl.types.groups import Prompt


def stops(run, error, match):
    """Plays the run, which must raise; what it raised. The run's own tasks are gone by then."""

    async def scenario():
        with pytest.raises(error, match=match) as caught:
            await run.play()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return caught.value

    return asyncio.run(scenario())


# -- rollout ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_scorer_that_breaks_is_the_cause(tmp_path, max_staleness):
    def score(prompt, text):
        if prompt.index == 7:
            raise ZeroDivisionError("a bug, not a bad sample")
        return parity(prompt, text)

    run = InProcessRun(make_config(tmp_path, max_staleness=max_staleness), score=score)
    error = stops(run, MoerlError, "a group could not be produced: ZeroDivisionError: a bug, not a bad sample")
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert max(run.groups, default=0) < 3


def test_a_prompt_without_one_sample_that_could_be_scored_names_the_prompt_and_the_reason(tmp_path):
    (tmp_path / "rewards.py").write_text("def score(data_source, solution_str, ground_truth, extra_info):\n    return float('nan')\n")
    term = RewardTerm(kind="function", path=f"{tmp_path / 'rewards.py'}:score")
    config = make_config(tmp_path, reward=RewardConfig(terms={"own": term}))

    async def scenario():
        async with RewardPool(config.reward) as rewards:
            await InProcessRun(config, rewards=rewards).play()

    with pytest.raises(MoerlError, match=r"DataError: prompt \d \(tiny/repeat\): none of its 4 samples could be scored.*reward.terms.own"):
        asyncio.run(scenario())


def test_a_reward_function_that_raises_for_every_sample_is_where_the_failure_report_points(tmp_path):
    function = tmp_path / "rewards.py"
    function.write_text("def score(data_source, solution_str, ground_truth, extra_info):\n    return ground_truth[1000]\n")
    config = make_config(tmp_path, reward=RewardConfig(terms={"own": RewardTerm(kind="function", path=f"{function}:score")}))

    async def scenario():
        async with RewardPool(config.reward) as rewards:
            await InProcessRun(config, rewards=rewards).play()

    with pytest.raises(MoerlError) as caught:
        asyncio.run(scenario())
    place = f"reward.terms.own: IndexError: string index out of range (at {function}:2 in score: return ground_truth[1000])"
    assert str(caught.value).endswith(place)
    closing = f"failed: reward worker on node {socket.gethostname()}, in rollout, at step 1\nlog: {tmp_path}/loop/run.log"
    assert caught.value.__notes__ == [f"{closing}\nmore: {tmp_path}/loop/failure.txt"]
    said = (tmp_path / "loop" / "failure.txt").read_text()
    assert said.startswith(f"{caught.value}\n{closing}\n")
    assert "moerl.types.errors.DataError: prompt" in said


class Dying(FakeEngine):
    """Ends all its requests at the first request of ticket 7."""

    async def generate(self, prompt_ids, sampling, request_id):
        if request_id.startswith("7-"):
            self._requests.fail(EngineError, f"{self.name}: the server died")
            raise EngineError(f"{self.name}: the server died")
        return await super().generate(prompt_ids, sampling, request_id)


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_server_that_dies_ends_the_run_and_is_named(tmp_path, max_staleness):
    engines = [new_engine("first", Dying), new_engine("second", Dying)]
    run = InProcessRun(make_config(tmp_path, max_staleness=max_staleness, num_steps=20), engines=engines)
    error = stops(run, MoerlError, r"EngineError: (first|second): .*the server died")
    assert isinstance(error.__cause__, EngineError)
    assert len(run.groups) < 20


class Renamed(FakeEngine):
    """Serves at another port after every start."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.num_starts, self.has_answered, self.is_back = 0, asyncio.Event(), asyncio.Event()

    async def start(self):
        self.num_starts += 1
        self.name = f"first:{self.num_starts}"
        await super().start()
        if self.num_starts == 2:
            self.is_back.set()

    async def finish(self, version, push_id):
        await super().finish(version, push_id)
        if version == 2:
            self.has_answered.set()


class Late(FakeEngine):
    """Answers the end of the push of version 2 when `other`, which has answered, was ended and started again."""

    other: Renamed

    async def finish(self, version, push_id):
        await super().finish(version, push_id)
        if version == 2:
            await self.other.has_answered.wait()
            self.other.kill()
            await self.other.is_back.wait()


def test_a_server_started_again_under_another_port_in_the_last_call_of_a_push_gets_the_weights_anew(tmp_path):
    first, late = new_engine("first:0", Renamed), new_engine("late", Late)
    late.other = first
    run = InProcessRun(make_config(tmp_path), engines=[first, late])
    asyncio.run(run.play())
    assert list(run.groups) == [1, 2, 3, 4]
    assert first._version == 4 and run.metrics()[-1]["fleet/restarts"] == 1


# -- weights ---------------------------------------------------------------------------------------------------


class Shifted(FakeEngine):
    """Reports other log-probs than the trainer's weights give, from `since` on."""

    since = 0

    def is_shifted(self, request_id):
        return self._version is not None and self._version >= self.since

    async def generate(self, prompt_ids, sampling, request_id):
        completion = await super().generate(prompt_ids, sampling, request_id)
        if not self.is_shifted(request_id):
            return completion
        return replace(completion, logprobs=tuple(logprob - 0.5 for logprob in completion.logprobs))


class ShiftedLater(Shifted):
    since = 2


class ShiftedCanariesLater(Shifted):
    def is_shifted(self, request_id):
        return self._version is not None and self._version >= 2 and request_id.startswith("canary")


class ShiftedBetweenCanaries(Shifted):
    def is_shifted(self, request_id):
        return not request_id.startswith("canary")


def test_a_server_with_other_weights_is_named_before_anything_is_drawn(tmp_path):
    engines = [new_engine("same"), new_engine("other", Shifted)]
    run = InProcessRun(make_config(tmp_path), engines=engines)
    error = stops(run, WeightError, r"(?s)canary of version 0: .*\* other: mean 0.5, .*likely causes")
    assert "* same" not in str(error)
    assert run.events == []


def test_a_server_of_another_model_is_named_before_anything_is_drawn(tmp_path):
    run = InProcessRun(make_config(tmp_path), engines=[new_engine("larger", vocab_size=2 * VOCAB_SIZE)])
    stops(run, WeightError, r"larger: canary-0-0: .*must be in the model's vocabulary \[0, 128\)")
    assert run.events == []


def test_a_server_that_goes_wrong_later_is_found_by_a_later_canary(tmp_path):
    config = make_config(tmp_path, num_steps=8, weights=WeightsConfig(canary_every=2))
    run = InProcessRun(config, engines=[new_engine("other", ShiftedCanariesLater)])
    stops(run, WeightError, r"canary of version 3: ")
    assert list(run.groups) == [1, 2, 3]


def test_a_server_whose_weights_change_between_pushes_is_found_in_the_step_that_used_them(tmp_path):
    run = InProcessRun(make_config(tmp_path), engines=[new_engine("other", ShiftedLater)])
    stops(run, GuardError, r"update of step 3: mean .* = 0\.5 \(\d+ tokens of other\).* weights\.mismatch_limit = 0\.1")
    assert list(run.groups) == [1, 2]
    assert run.trainer.version == 2, "the update that used them changed nothing"


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_one_of_several_servers_whose_weights_change_is_retired_and_the_others_go_on(tmp_path, max_staleness):
    """In an asynchronous run by the canary of a step that has only older tokens, or by the tokens of the present weights."""
    run = InProcessRun(make_config(tmp_path, max_staleness=max_staleness), engines=[new_engine("same"), new_engine("other", ShiftedLater)])
    asyncio.run(run.play())
    assert [row["fleet/retired"] for row in run.metrics()] == [0, 0, 1, 1]
    assert set(run.groups) == {1, 2, 3, 4}
    assert run.trainer.version == (3 if max_staleness == 0 else 4), "an update that used them changed nothing; a canary comes before it"


def test_a_server_with_too_few_tokens_to_compare_is_retired_by_a_canary(tmp_path):
    sizes = dict(groups_per_step=2, group_size=4, rollout=RolloutConfig(engine="fake", max_response_tokens=4))
    run = InProcessRun(make_config(tmp_path, **sizes), engines=[new_engine("same"), new_engine("other", ShiftedLater)])
    asyncio.run(run.play())
    assert run.metrics()[-1]["fleet/retired"] == 1


class Foreign(FakeEngine):
    """Takes weights from somebody who is not the run, with the version it has."""

    async def generate(self, prompt_ids, sampling, request_id):
        if self._version == 1 and not request_id.startswith("canary"):
            self._requests.pushed(1, "of another run")  # as the end of a push that somebody else began
        return await super().generate(prompt_ids, sampling, request_id)


def test_a_server_with_weights_that_the_run_did_not_push_is_retired_with_its_first_completion(tmp_path):
    run = InProcessRun(make_config(tmp_path), engines=[new_engine("same"), new_engine("other", Foreign)])
    asyncio.run(run.play())
    assert [row["fleet/retired"] for row in run.metrics()] == [0, 1, 1, 1]
    trained = {
        span.push_id for groups in run.groups.values() for group in groups for sample in group.samples for span in sample.completion.spans
    }
    assert "of another run" not in trained and "" not in trained


def test_the_only_server_with_weights_that_the_run_did_not_push_ends_the_run_with_the_cause(tmp_path):
    run = InProcessRun(make_config(tmp_path), engines=[new_engine("other", Foreign)])
    stops(run, EngineError, r"other: .* tokens are said to be of weights of version 1, which no push of this run brought so")


def test_a_first_step_whose_log_probs_disagree_is_neither_recorded_nor_saved(tmp_path):
    run = InProcessRun(make_config(tmp_path), engines=[new_engine("other", ShiftedBetweenCanaries)])
    stops(run, GuardError, r"update of step 1: mean .* = 0\.5.* weights\.mismatch_limit = 0\.1")
    assert run.groups == {}
    assert checkpoint_dirs.newest(tmp_path / "loop" / "checkpoints") is None


class SilentInCanaries(FakeEngine):
    """From the second push on, as one whose engine hangs in a process of its own: it answers probes."""

    async def generate(self, prompt_ids, sampling, request_id):
        if request_id.startswith("canary") and self._version >= 1:
            await asyncio.sleep(3600)
        return await super().generate(prompt_ids, sampling, request_id)


@pytest.mark.parametrize(("num_prompt", "asked"), [(4, 8), (29, 3), (31, 1)])
def test_a_canary_fits_beside_prompts_that_leave_less_room_than_a_run_needs(tmp_path, num_prompt, asked):
    """Those of an evaluation, whose own answers are shorter."""
    config = make_config(tmp_path)
    config = replace(config, model=replace(config.model, max_context=32), rollout=replace(config.rollout, max_response_tokens=8))
    prompts = [Prompt(index=0, token_ids=(1,) * num_prompt, text="", data_source="", ground_truth="")]
    parts: dict[str, Any] = {"train": None, "pool": SimpleNamespace(fleet=None), "residency": None}
    assert ServerTrust(config, **parts, prompts=prompts, vocab_size=8)._sampling()["max_tokens"] == asked


def test_a_canary_that_is_not_answered_ends_at_the_deadline_of_a_completion(tmp_path, monkeypatch):
    monkeypatch.setattr(fleet, "LOSS_SECONDS", 0.1)
    config = make_config(tmp_path, weights=WeightsConfig(canary_every=1), deadlines=DeadlineConfig(completion_seconds=0.3))
    run = InProcessRun(config, engines=[new_engine("silent", SilentInCanaries)])
    stops(run, EngineError, r"a canary was not answered within 0\.3 s \(deadlines\.completion_seconds\)")
    assert list(run.groups) == [1]


class SilentUntilItIsEnded(SilentInCanaries):
    def kill(self):
        self.generate = super(SilentInCanaries, self).generate
        super().kill()


def test_a_server_that_hangs_in_the_canary_before_an_update_is_started_again(tmp_path):
    """Of an asynchronous run, whose samples are of older weights."""
    config = make_config(tmp_path, max_staleness=1, deadlines=DeadlineConfig(completion_seconds=0.3))
    engines = [new_engine("same"), new_engine("silent", SilentUntilItIsEnded)]
    run = InProcessRun(config, engines=engines, hangs=HangReports(tmp_path))
    asyncio.run(run.play())
    assert set(run.groups) == {1, 2, 3, 4}
    assert run.metrics()[-1]["fleet/restarts"] == 1
    (report,) = (tmp_path / "hangs").glob("*/report.txt")
    assert report.read_text().startswith("rollout: server silent did not arrive within 0.3 s (deadlines.completion_seconds)")


class OldWeights(FakeEngine):
    """Confirms pushes after the first one and goes on with the old version."""

    async def finish(self, version, push_id):
        await super().finish(version, push_id)
        self._core.version = 0


def test_a_server_that_goes_on_with_old_weights_is_found_by_the_canary(tmp_path):
    run = InProcessRun(make_config(tmp_path, weights=WeightsConfig(canary_every=1)), engines=[new_engine("slow", OldWeights)])
    stops(run, WeightError, "canary on slow: sampled with weights of version 0, must be 1")
    assert list(run.groups) == [1]


class RefusesSecond(FakeEngine):
    async def finish(self, version, push_id):
        if version == 2:
            raise WeightError(f"{self.name}: out of memory")
        await super().finish(version, push_id)


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_push_that_fails_ends_the_run_and_its_step_which_was_trained_is_recorded_and_saved(tmp_path, max_staleness):
    engines = [new_engine("first"), new_engine("second", RefusesSecond)]
    run = InProcessRun(make_config(tmp_path, max_staleness=max_staleness), engines=engines)
    stops(run, WeightError, "second: out of memory")
    assert list(run.groups) == [1, 2]
    assert checkpoint_dirs.newest(tmp_path / "loop" / "checkpoints").name == "step-000002"


# -- trainer ---------------------------------------------------------------------------------------------------


def failing_update(run, outcome):
    """From the third update on."""

    async def fail():
        if run.trainer.version == 2:
            raise outcome

    run.trainer.while_updating = fail
    return run


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_trainer_that_fails_ends_the_run_with_its_error(tmp_path, max_staleness):
    run = failing_update(InProcessRun(make_config(tmp_path, max_staleness=max_staleness)), TrainError("rank 1 failed in update"))
    stops(run, TrainError, "(?m)^rank 1 failed in update$")
    assert list(run.groups) == [1, 2]
    assert [row["step"] for row in run.metrics()] == [1, 2]


class NotANumber(RecordingTrainer):
    async def update(self, *args, **kwargs):
        stats = await super().update(*args, **kwargs)
        return replace(stats, skipped_updates=("rank 1, micro-batch 0, samples 2",)) if self.version == 3 else stats


def test_after_an_update_that_was_not_applied_nothing_is_pushed_or_saved(tmp_path):
    run = InProcessRun(make_config(tmp_path))
    run.trainer.__class__ = NotANumber
    stops(run, GuardError, "step 3: loss or gradient is not finite.*rank 1, micro-batch 0, samples 2")
    assert run.events[-1] == ("updated", 3)
    assert checkpoint_dirs.newest(tmp_path / "loop" / "checkpoints").name == "step-000002"


def test_a_cancelled_run_ends_its_tasks_and_requests(tmp_path):
    run = InProcessRun(make_config(tmp_path, max_staleness=1, num_steps=1000))
    cancelled = asyncio.Event()
    run.trainer.after_save = lambda version: cancelled.set() if version == 3 else None

    async def scenario():
        task = asyncio.create_task(run.play())
        await cancelled.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())
    assert list(run.groups) == [1, 2, 3]
