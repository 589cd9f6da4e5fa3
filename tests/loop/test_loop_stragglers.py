"""Groups that take long: passed by younger ones, or put off to begin anew. Nothing is lost, nothing too stale, however a run is stopped."""

import asyncio
import random
from dataclasses import replace

import pytest
from in_process_run import InProcessRun, make_config, new_engine

from moerl.config.algorithm_settings import algorithm
from moerl.rollout.engines.fake_engine import FakeEngine

GRPO, DAPO = algorithm("grpo"), algorithm("dapo", "overlong=none", "max_attempts=50")
SIZES = dict(groups_per_step=4, group_size=2, num_steps=12)
PASSED, PARKED = dict(max_staleness=3, groups_in_flight=8), dict(spare_groups=2)
WAYS = [PASSED, PARKED, {**PARKED, "max_staleness": 1}]
ways = pytest.mark.parametrize("way", WAYS, ids=["passed", "parked", "parked-1"])
both = pytest.mark.parametrize("algorithm", [GRPO, DAPO], ids=["grpo", "dapo"])


class Uneven(FakeEngine):
    """Prompts take times of their own: a few far more than the others."""

    async def generate(self, prompt_ids, sampling, request_id):
        completion = await super().generate(prompt_ids, sampling, request_id)
        for _ in range(int(random.Random(request_id.partition("-")[0]).lognormvariate(3, 1.5))):
            await asyncio.sleep(0)
        return completion


class Late(FakeEngine):
    """One prompt in twelve takes until two more pushes have come, which is as long as PASSED lets others pass it."""

    num_pushes = 0

    async def finish(self, version, push_id):
        await super().finish(version, push_id)
        self.num_pushes += 1

    async def generate(self, prompt_ids, sampling, request_id):
        ticket, first = request_id.partition("-")[0], self.num_pushes
        completion = await super().generate(prompt_ids, sampling, request_id)
        while ticket.isdecimal() and int(ticket) % 12 == 5 and self.num_pushes < first + 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        return completion


def uneven(config, **parts):
    kind = Uneven if config.groups_in_flight is None else Late
    return InProcessRun(config, engines=[new_engine("uneven", kind)], **parts)


def play(config, **parts):
    run = uneven(config, **parts)
    asyncio.run(run.play())
    return run


def trained(run):
    return [ticket for tickets in run.trained().values() for ticket in tickets]


@both
@ways
def test_prompts_train_once_and_out_of_their_order(tmp_path, algorithm, way):
    run = play(make_config(tmp_path, algorithm=algorithm, **SIZES, **way))
    tickets = trained(run)
    assert len(tickets) == len(set(tickets)) == 48
    assert tickets != sorted(tickets)
    drawn = [number for name, number in run.events if name == "drawn"]
    if way is PASSED:
        assert drawn == list(range(len(drawn)))
        return
    parked = sum(row["groups/parked"] for row in run.metrics())
    assert len(set(drawn)) < len(drawn) <= len(set(drawn)) + parked
    dropped = sum(row["groups/dropped"] for row in run.metrics())
    assert len(set(drawn)) == 48 + dropped, "every prompt that was drawn was trained or not worth it"


@both
@ways
def test_no_sample_is_older_than_max_staleness(tmp_path, algorithm, way):
    config = make_config(tmp_path, algorithm=algorithm, **SIZES, **way)
    run = play(config)
    for version in run.groups:
        assert all(version - 1 - config.max_staleness <= sampled < version for sampled in run.versions(version))


def test_what_is_late_has_the_steps_that_are_left_and_the_others_are_less_stale(tmp_path):
    run = play(make_config(tmp_path, **{**SIZES, **PASSED, "num_steps": 20}))
    ages = {group.prompt.index: version - 1 - min(span.version for sample in group.samples for span in sample.completion.spans)
            for version, groups in run.groups.items() for group in groups}  # fmt: skip
    late = {age for ticket, age in ages.items() if ticket % 12 == 5}
    assert max(late) >= 2
    assert max(age for ticket, age in ages.items() if ticket % 12 != 5) <= 1


@pytest.mark.parametrize("turns", [0, 7, 150])
@both
@ways
def test_a_stopped_run_trains_no_prompt_twice_and_loses_none(tmp_path, algorithm, way, turns):
    config = make_config(tmp_path, algorithm=algorithm, **SIZES, **way)
    first = uneven(config)
    saved = asyncio.Event()
    first.trainer.after_save = lambda version: saved.set() if version == 5 else None

    async def stopped():
        task = asyncio.create_task(first.play())
        await saved.wait()
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(stopped())
    resumed = play(config)
    before = [ticket for version, tickets in first.trained().items() if version < min(resumed.groups) for ticket in tickets]
    tickets = before + trained(resumed)
    assert len(tickets) == len(set(tickets)) == 48
    if algorithm is GRPO and way is not PASSED:
        assert sorted(tickets) == list(range(48))


def test_a_run_whose_groups_were_passed_may_go_on_in_order_and_then_trains_those_first(tmp_path):
    config = make_config(tmp_path, **SIZES, **PASSED)
    before = trained(play(replace(config, num_steps=5)))
    assert set(range(max(before))) - set(before) == {17}
    after = trained(play(replace(config, num_steps=12, groups_in_flight=None)))
    assert after[0] == 17
    assert sorted(before + after) == list(range(48))


def test_servers_on_the_trainers_gpus_give_up_what_was_parked(tmp_path):
    run = play(make_config(tmp_path, **SIZES, **PARKED), num_shared=1)
    assert sum(row["groups/parked"] for row in run.metrics()) > 0
    assert sorted(trained(run)) == list(range(48))
