"""The invariants listed in moerl/rollout/buffer.py, under random interleavings of producers and trainer."""

import asyncio
import contextlib
import random
import time
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_here import stored_here

from moerl.algorithms.algorithm import build_algorithm
from moerl.config.algorithm_settings import settings_of
from moerl.rollout.buffer import GroupBuffer
from moerl.rollout.ticket_buffer import outcome_of
from moerl.types.completion import Completion, VersionSpan
from moerl.types.errors import DynamicSamplingError, MoerlError
from moerl.types.groups import Group, Prompt, Sample, Score

SETTINGS = settings(derandomize=True, deadline=None, max_examples=120)
UNLIMITED = 10**9


def make_group(ticket, rewards=(0, 1), version=0):
    spans = (VersionSpan(version=version, num_tokens=1),)
    completion = Completion(request_id="r", token_ids=(1,), logprobs=(-1.0,), spans=spans, finish_reason="stop")
    samples = tuple(Sample(completion=stored_here((1,), completion), score=Score(reward=reward)) for reward in rewards)
    return Group(
        prompt=Prompt(index=ticket, token_ids=(1,), text="", data_source="test", ground_truth=""),
        samples=samples,
    )


def oldest_version(group):
    return min(span.version for sample in group.samples for span in sample.completion.spans)


def make_buffer(groups_per_step=2, max_staleness=0, max_attempts=UNLIMITED, **options):
    return GroupBuffer(groups_per_step=groups_per_step, max_staleness=max_staleness, max_attempts=max_attempts, **options)


@dataclass
class Run:
    """A trainer and its producers around one buffer; every await gives way a random number of times."""

    buffer: GroupBuffer
    rng: random.Random
    groups_per_step: int
    max_staleness: int
    keeps: set[int]
    """Tickets worth training on."""
    is_slow: bool = False
    """Some groups take many times as long as others."""
    version: int = 0
    held: int = 0
    drawn: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    steps: list[list[int]] = field(default_factory=list)
    saves: list[tuple[int, dict[str, Any], int]] = field(default_factory=list)
    """(steps trained, state of the buffer, tickets drawn so far)"""
    live: set[int] = field(default_factory=set)
    passed: dict[int, int] = field(default_factory=dict)
    """Ticket -> younger ones taken while it was live."""

    async def give_way(self):
        for _ in range(self.rng.choice([0, 1, 2, 7])):
            await asyncio.sleep(0)

    async def produce(self):
        while True:
            ticket = await self.buffer.reserve()
            version, self.held = self.version, self.held + 1
            self.drawn.append(ticket)
            self.live.add(ticket)
            assert self.held <= self.buffer.capacity  # bounded
            for _ in range(self.rng.choice([1, 1, 1, 20]) if self.is_slow else 1):
                await self.give_way()
            if ticket in self.keeps:
                self.buffer.fill(ticket, make_group(ticket, version=version))
            else:
                self.held -= 1
                self.live.remove(ticket)
                self.dropped.append(ticket)
                self.buffer.drop(ticket, make_group(ticket, rewards=(0, 0)))

    async def train(self, num_steps):
        while len(self.steps) < num_steps:
            groups = await self.buffer.take(self.groups_per_step)
            assert all(oldest_version(group) >= self.version - self.max_staleness for group in groups)  # staleness
            taken = [group.prompt.index for group in groups]
            self.live -= set(taken)
            for ticket in self.live:
                self.passed[ticket] = self.passed.get(ticket, 0) + sum(each > ticket for each in taken)
            await self.give_way()
            self.steps.append(taken)
            self.saves.append((len(self.steps), self.buffer.state(), len(self.drawn)))
            await self.give_way()
            self.version += 1
            self.held -= self.groups_per_step
            self.buffer.release(self.groups_per_step)
            await self.give_way()

    async def until(self, num_steps):
        producers = [asyncio.create_task(self.produce()) for _ in range(self.rng.choice([1, 2, 5, 16]))]
        try:
            await self.train(num_steps)
        finally:
            for task in producers:
                task.cancel()
            for task in producers:
                with contextlib.suppress(asyncio.CancelledError, MoerlError):
                    await task


@st.composite
def run_inputs(draw):
    return dict(
        seed=draw(st.integers(0, 10**6)),
        groups_per_step=draw(st.integers(1, 5)),
        max_staleness=draw(st.integers(0, 3)),
        keep_share=draw(st.sampled_from([1.0, 0.6, 0.25])),
    )


@st.composite
def windowed_inputs(draw):
    inputs = draw(run_inputs())
    share = draw(st.floats(0, 1))
    slots = inputs["groups_per_step"] * (1 + share * inputs["max_staleness"])
    return {**inputs, "num_slots": int(slots), "is_slow": draw(st.booleans())}


def make_run(inputs, *, first_ticket=0, skipped=(), max_attempts=UNLIMITED, interleaving=0):
    """`interleaving` changes who runs when, not which tickets are kept."""
    keeps = random.Random(inputs["seed"])
    sizes = {name: inputs[name] for name in ("groups_per_step", "max_staleness")}
    return Run(
        buffer=make_buffer(
            **sizes, max_attempts=max_attempts, first_ticket=first_ticket, skipped=skipped, num_slots=inputs.get("num_slots")
        ),
        rng=random.Random(f"{inputs['seed']} {interleaving}"),
        is_slow=inputs.get("is_slow", False),
        keeps={ticket for ticket in range(2000) if keeps.random() < inputs["keep_share"]},
        **sizes,
    )


def finish(run, num_steps):
    asyncio.run(asyncio.wait_for(run.until(num_steps), 20))
    return run


def simulate(inputs, *, num_steps=6, **options):
    return finish(make_run(inputs, **options), num_steps)


@SETTINGS
@given(windowed_inputs())
def test_bounded(inputs):
    run = simulate(inputs)  # asserts the bound at every reservation
    assert run.buffer.capacity == inputs["num_slots"]
    assert len(run.drawn) - len(run.dropped) <= 6 * inputs["groups_per_step"] + run.buffer.capacity


@SETTINGS
@given(windowed_inputs())
def test_staleness(inputs):
    simulate(inputs, num_steps=20)  # asserts the age of every group it takes


@SETTINGS
@given(windowed_inputs())
def test_window(inputs):
    run = simulate(inputs, num_steps=20)
    assert run.buffer.window + inputs["num_slots"] == (inputs["max_staleness"] + 1) * inputs["groups_per_step"] + 1
    assert max(run.passed.values(), default=0) < run.buffer.window


def test_the_window_is_used_whole():
    async def main():
        buffer = make_buffer(groups_per_step=2, max_staleness=2, num_slots=4)  # 3 groups are passed to train, of the 6 of 3 steps
        tickets = [await buffer.reserve() for _ in range(4)]
        for ticket in tickets[1:]:
            buffer.fill(ticket, make_group(ticket))
        taken = [group.prompt.index for group in await buffer.take(2)]
        buffer.release(2)
        for _ in range(2):
            ticket = await buffer.reserve()
            buffer.fill(ticket, make_group(ticket))
        assert (taken, buffer.window, buffer.state()) == ([1, 2], 3, {"drawn": 3, "skipped": [0]})
        waiting = asyncio.create_task(buffer.take(2))
        await asyncio.sleep(0)
        assert not waiting.done(), "four would have passed ticket 0"
        buffer.fill(0, make_group(0))
        assert [group.prompt.index for group in await waiting] == [0, 3]
        assert buffer.state() == {"drawn": 4, "skipped": []}

    asyncio.run(main())


@SETTINGS
@given(windowed_inputs(), st.data())
def test_never_stuck(inputs, data):
    """Whatever finished when: once the oldest groups of a step have, it goes on."""

    async def main():
        per_step = inputs["groups_per_step"]
        buffer = make_buffer(per_step, inputs["max_staleness"], num_slots=inputs["num_slots"])
        live: list[int] = []
        for _ in range(8):
            while len(live) < buffer.capacity:
                live.append(await buffer.reserve())
                if data.draw(st.booleans()):
                    buffer.fill(live[-1], make_group(live[-1]))
            for ticket in live[:per_step]:
                if buffer._live[ticket] is None:
                    buffer.fill(ticket, make_group(ticket))
            taken = [group.prompt.index for group in await asyncio.wait_for(buffer.take(per_step), 5)]
            assert taken == live[:per_step]
            live = live[per_step:]
            buffer.release(per_step)

    asyncio.run(main())


@SETTINGS
@given(run_inputs())
def test_in_order(inputs):
    first, second = simulate(inputs), simulate(inputs, interleaving=1)
    taken = [ticket for step in first.steps for ticket in step]
    assert first.drawn == list(range(len(first.drawn)))
    assert taken == sorted(first.keeps)[: len(taken)]
    assert first.steps == second.steps


@SETTINGS
@given(windowed_inputs(), st.data())
def test_resumable(inputs, data):
    run = simulate(inputs)
    num_trained, state, num_drawn = data.draw(st.sampled_from(run.saves))
    before = [ticket for step in run.steps[:num_trained] for ticket in step]
    drawn, skipped = state["drawn"], state["skipped"]
    assert all(ticket < drawn for ticket in (*before, *skipped))
    assert skipped == sorted(set(skipped) - set(before))
    resumed = simulate(inputs, first_ticket=drawn, skipped=skipped, num_steps=3, interleaving=2)
    trained = before + [ticket for step in resumed.steps for ticket in step]
    assert len(trained) == len(set(trained))
    untrained = sorted(run.keeps - set(trained))
    if untrained and untrained[0] < max(trained):  # it waits in the resumed run, as it would in the first one
        assert untrained[0] in (*resumed.buffer._live, *resumed.buffer._skipped)
    if resumed.buffer.window == 1:
        assert skipped == []
        assert trained == sorted(run.keeps)[: len(trained)]
    if inputs["max_staleness"] == 0:
        assert drawn == num_drawn  # nothing is drawn again


@SETTINGS
@given(windowed_inputs(), st.integers(1, 3))
def test_a_run_that_is_resumed_before_it_trained_starts_where_the_one_before_did(inputs, num_skipped):
    skipped = list(range(3, 3 + num_skipped))
    run = make_run(inputs, first_ticket=30, skipped=skipped)
    assert run.buffer.state() == {"drawn": 30, "skipped": skipped}
    for _ in range(min(2, run.buffer.capacity)):
        asyncio.run(run.buffer.reserve())
    assert run.buffer.state() == {"drawn": 30, "skipped": skipped}


@st.composite
def bounded_runs(draw):
    return {**draw(run_inputs()), "keep_share": draw(st.sampled_from([0.5, 0.3, 0.1, 0.0]))}, draw(st.integers(1, 6))


def first_step_over_the_bound(keeps, *, groups_per_step, max_attempts, num_steps):
    """By definition: the first step that does not find its groups among its first max_attempts * groups_per_step tickets."""
    ticket = 0
    for step in range(num_steps):
        found, draws = 0, 0
        while found < groups_per_step:
            if draws == max_attempts * groups_per_step:
                return step
            found, draws, ticket = found + (ticket in keeps), draws + 1, ticket + 1
    return None


@SETTINGS
@given(bounded_runs(), st.integers(0, 3))
def test_draws_bounded(case, interleaving):
    inputs, max_attempts = case
    run = make_run(inputs, max_attempts=max_attempts, interleaving=interleaving)
    failing = first_step_over_the_bound(run.keeps, groups_per_step=run.groups_per_step, max_attempts=max_attempts, num_steps=5)
    if failing is None:
        # Steps beyond the fifth may be drawn ahead and may be over the bound; they must not hurt the ones before.
        ahead = first_step_over_the_bound(run.keeps, groups_per_step=run.groups_per_step, max_attempts=max_attempts, num_steps=9)
        with contextlib.suppress(DynamicSamplingError) if ahead is not None else contextlib.nullcontext():
            finish(run, 5)
        assert len(run.steps) >= (5 if ahead is None else min(5, ahead - run.max_staleness))
        return
    with pytest.raises(DynamicSamplingError):
        finish(run, 5)
    assert failing - run.max_staleness <= len(run.steps) <= failing
    # Everything the steps in the buffer may draw, and at most one more group per producer slot.
    assert len(run.drawn) <= (len(run.steps) + run.max_staleness + 1) * max_attempts * run.groups_per_step + run.buffer.capacity


def test_a_failed_step_explains_the_rewards_it_saw():
    async def main():
        buffer = make_buffer(groups_per_step=2, max_attempts=3)
        for rewards in [(0, 0), (1, 1), (0, 0), ()]:
            buffer.drop(await buffer.reserve(), make_group(0, rewards=rewards))
        waiting = asyncio.create_task(buffer.take(2))
        await asyncio.sleep(0)
        assert not waiting.done()
        buffer.drop(await buffer.reserve(), make_group(0, rewards=(0, 0)))
        await waiting

    with pytest.raises(DynamicSamplingError) as raised:
        asyncio.run(main())
    assert str(raised.value).startswith(
        "algorithm.max_attempts = 3: dynamic sampling found fewer than 2 usable groups in 6 draws\n"
        "    3 of 5 dropped groups scored 0 for every sample\n"
        "    1 of 5 dropped groups scored 1 for every sample\n"
        "    1 of 5 dropped groups had no sample that could be scored\n"
        "    why: "
    )


def test_a_failed_step_tells_rounding_and_a_missing_baseline_from_samples_that_are_left_out():
    """0.1 + 0.2 is not 0.3, and counts as equal; remax drops a group whose completion at temperature 0 has no reward."""
    equal, lone = make_group(0, rewards=(0.1 + 0.2, 0.3)), replace(make_group(1), errors=("died",), lacks_greedy=True)
    algorithm = build_algorithm(settings_of({"advantage": {"kind": "remax"}, "objective": {"kind": "reinforce"}, "max_attempts": 2}), 8)
    assert not algorithm.keeps_group(lone)
    assert outcome_of(equal) == "scored 0.3 for every sample"
    assert outcome_of(lone) == "had no reward at temperature 0, with which its samples are compared"
    assert outcome_of(make_group(2)) == "scored differently only in samples the algorithm leaves out"


def test_the_explanation_of_many_outcomes_stays_short():
    async def main():
        buffer = make_buffer(groups_per_step=1, max_attempts=13)
        for i in range(13):
            buffer.drop(await buffer.reserve(), make_group(0, rewards=(i / 7, i / 7)))
        await buffer.take(1)

    with pytest.raises(DynamicSamplingError, match=r"every sample\n    5 more outcomes\n    why: ") as raised:
        asyncio.run(main())
    assert str(raised.value).count(" of 13 dropped groups") == 8


def test_take_waits_for_the_oldest_ticket_and_is_all_or_nothing():
    async def main():
        buffer = make_buffer(groups_per_step=2)
        first, second = await buffer.reserve(), await buffer.reserve()
        buffer.fill(second, make_group(second))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(buffer.take(2), 0.01)
        buffer.fill(first, make_group(first))
        assert [group.prompt.index for group in await buffer.take(2)] == [first, second]

    asyncio.run(main())


def test_a_dropped_group_frees_its_slot_at_once_and_a_taken_one_only_when_released():
    async def main():
        buffer = make_buffer(groups_per_step=1)
        buffer.drop(await buffer.reserve(), make_group(0, rewards=(1, 1)))
        ticket = await asyncio.wait_for(buffer.reserve(), 20)
        waiting = asyncio.create_task(buffer.reserve())
        buffer.fill(ticket, make_group(ticket))
        assert [group.prompt.index for group in await buffer.take(1)] == [1]
        assert buffer.step_metrics() == {"groups/dropped": 1.0}
        await asyncio.sleep(0)
        assert not waiting.done()
        buffer.release(1)
        assert await asyncio.wait_for(waiting, 20) == 2

    asyncio.run(main())


def test_a_step_over_the_bound_fails_when_the_steps_before_it_no_longer_hide_it():
    async def main():
        buffer = make_buffer(groups_per_step=1, max_staleness=1, max_attempts=2)
        for kept in (True, False, False, True):
            ticket = await buffer.reserve()
            if kept:
                buffer.fill(ticket, make_group(ticket))
            else:
                buffer.drop(ticket, make_group(ticket, rewards=(0, 0)))
        assert [group.prompt.index for group in await buffer.take(1)] == [0]
        with pytest.raises(DynamicSamplingError, match="2 of 2 dropped groups"):
            await buffer.take(1)

    asyncio.run(main())


def test_a_step_that_drops_many_groups_does_not_look_at_all_of_them_for_each():
    async def seconds(num_drops):
        buffer, group = make_buffer(groups_per_step=1000, max_staleness=4, max_attempts=20), make_group(0, rewards=(0, 0))
        begin = time.process_time()
        for _ in range(num_drops):
            buffer.drop(await buffer.reserve(), group)
        return time.process_time() - begin

    assert asyncio.run(seconds(16_000)) < 40 * asyncio.run(seconds(1_000))


def test_the_cost_of_a_step_counts_only_its_own_draws():
    async def main():
        buffer = make_buffer(groups_per_step=1, max_staleness=1)
        buffer.fill(await buffer.reserve(), make_group(0))
        buffer.drop(await buffer.reserve(), make_group(1, rewards=(0, 0)))
        buffer.fill(await buffer.reserve(), make_group(2))
        costs = []
        for _ in range(2):
            await buffer.take(1)
            costs.append(buffer.step_metrics()["groups/dropped"])
        assert costs == [0, 1]

    asyncio.run(main())


def test_a_failure_wakes_everyone_with_its_cause():
    cause = OSError("engine gone")

    async def main():
        buffer = make_buffer(groups_per_step=2)
        await buffer.reserve()
        await buffer.reserve()
        waiting = [asyncio.create_task(work) for work in (buffer.take(2), buffer.reserve(), buffer.reserve(), buffer.reserve())]
        await asyncio.sleep(0)
        buffer.fail(cause)
        buffer.fail(RuntimeError("a later one"))
        results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 20)
        for error in results:
            assert isinstance(error, MoerlError)
            assert str(error) == "rollout stopped, because a group could not be produced: OSError: engine gone"
            assert error.__cause__ is cause
        with pytest.raises(MoerlError):
            await buffer.take(2)

    asyncio.run(main())


def test_a_producer_cancelled_while_it_waits_takes_no_slot():
    async def main():
        buffer = make_buffer(groups_per_step=1)
        ticket = await buffer.reserve()
        cancelled, waiting = asyncio.create_task(buffer.reserve()), asyncio.create_task(buffer.reserve())
        await asyncio.sleep(0)
        cancelled.cancel()
        buffer.drop(ticket, make_group(ticket, rewards=(0, 0)))
        assert await asyncio.wait_for(waiting, 20) == 1

    asyncio.run(main())


def test_more_groups_than_can_ever_be_ready_are_refused():
    async def main():
        buffer = make_buffer(groups_per_step=1)
        buffer.fill(await buffer.reserve(), make_group(0))
        await buffer.take(1)
        await buffer.take(1)

    with pytest.raises(AssertionError, match="release the taken groups first"):
        asyncio.run(main())
