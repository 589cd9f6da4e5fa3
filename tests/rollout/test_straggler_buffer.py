"""The invariants listed in moerl/rollout/straggler_buffer.py, under random interleavings of producers and trainer."""

import asyncio
import contextlib
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_buffer import UNLIMITED, make_group, oldest_version

from moerl.rollout.straggler_buffer import MAX_PARKS, StragglerBuffer
from moerl.types.errors import DynamicSamplingError, MoerlError

SETTINGS = settings(derandomize=True, deadline=None, max_examples=60)


@dataclass
class Run:
    """A trainer and its producers around one buffer. A group takes as many turns of the event loop as its ticket says, however often it is
    begun."""

    buffer: StragglerBuffer
    seed: int
    groups_per_step: int
    spare_groups: int
    max_staleness: int
    num_steps: int
    keeps: set[int]
    """Tickets worth training on."""
    version: int = 0
    is_resumed: bool = False
    error: DynamicSamplingError | None = None
    taken: list[int] = field(default_factory=list)
    """Not released."""
    drawn: list[int] = field(default_factory=list)
    """As often as they were begun."""
    finished: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    steps: list[list[int]] = field(default_factory=list)
    saves: list[tuple[int, dict[str, Any]]] = field(default_factory=list)

    async def group(self, ticket, version):
        rng = random.Random(f"{self.seed} {ticket}")
        for _ in range(int(rng.lognormvariate(2, 1))):
            await asyncio.sleep(0)
        return make_group(ticket, version=version)

    async def produce(self):
        while True:
            ticket = await self.buffer.reserve()
            self.drawn.append(ticket)
            finished = sum(len(each.groups) for each in self.buffer._rounds)
            assert len(self.buffer._live) + finished + len(self.taken) <= self.buffer.capacity  # bounded
            group = await self.buffer.unless_parked(ticket, self.group(ticket, self.version))
            if group is None:
                continue
            if ticket in self.keeps:
                self.finished.append(ticket)
                self.buffer.fill(ticket, group)
            else:
                self.dropped.append(ticket)
                self.buffer.drop(ticket, make_group(ticket, rewards=(0, 0)))

    async def train(self):
        rng = random.Random(f"{self.seed} trainer")
        while len(self.steps) < self.num_steps:
            groups = await self.buffer.take(self.groups_per_step)
            assert all(oldest_version(group) >= self.version - self.max_staleness for group in groups)  # staleness
            self.taken = [group.prompt.index for group in groups]
            self.steps.append(self.taken)
            self.saves.append((len(self.steps), self.buffer.state()))
            most = MAX_PARKS * (self.groups_per_step + self.spare_groups) + self.max_staleness * self.spare_groups
            assert self.is_resumed or len(self.buffer.parked) <= most  # patience
            for _ in range(rng.choice([0, 3, 30])):
                await asyncio.sleep(0)
            self.version, self.taken = self.version + 1, []
            self.buffer.release(self.groups_per_step)

    async def play(self):
        producers = [asyncio.create_task(self.produce()) for _ in range(self.buffer.capacity)]
        try:
            await self.train()
        finally:
            for task in producers:
                task.cancel()
            for task in producers:
                with contextlib.suppress(asyncio.CancelledError, MoerlError):
                    await task

    @property
    def trained(self):
        return [ticket for step in self.steps for ticket in step]


@st.composite
def run_inputs(draw, keep_shares=(1.0, 0.6)):
    groups_per_step = draw(st.integers(1, 5))
    return dict(
        seed=draw(st.integers(0, 10**6)),
        groups_per_step=groups_per_step,
        spare_groups=draw(st.integers(1, groups_per_step)),
        max_staleness=draw(st.integers(0, 2)),
        num_steps=draw(st.integers(0, 25)),
        keep_share=draw(st.sampled_from(keep_shares)),
    )


def simulate(inputs, *, max_attempts=UNLIMITED, num_steps=None, **options):
    sizes = {name: inputs[name] for name in ("groups_per_step", "spare_groups", "max_staleness")}
    num_steps = inputs["num_steps"] if num_steps is None else num_steps
    rng = random.Random(inputs["seed"])
    keeps = {ticket for ticket in range(5000) if rng.random() < inputs["keep_share"]}

    async def main():
        buffer = StragglerBuffer(**sizes, max_attempts=max_attempts, num_steps=num_steps, **options)
        run = Run(buffer=buffer, seed=inputs["seed"], num_steps=num_steps, keeps=keeps, is_resumed=bool(options), **sizes)
        try:
            await asyncio.wait_for(run.play(), 20)
        except DynamicSamplingError as error:
            run.error = error
        return run

    return asyncio.run(main())


@SETTINGS
@given(run_inputs())
def test_bounded_staleness_and_patience(inputs):
    run = simulate(inputs)  # asserts these at every reservation and step
    assert run.buffer.capacity == (inputs["max_staleness"] + 1) * (inputs["groups_per_step"] + inputs["spare_groups"])
    assert all(run.drawn.count(ticket) <= MAX_PARKS + 1 for ticket in run.drawn)


@SETTINGS
@given(run_inputs())
def test_first_finished(inputs):
    """Without staleness every kept group that finishes before a step is complete trains in it."""
    run = simulate({**inputs, "max_staleness": 0})
    assert [sorted(run.finished[at : at + run.groups_per_step]) for at in range(0, len(run.finished), run.groups_per_step)] == run.steps


@SETTINGS
@given(run_inputs())
def test_complete(inputs):
    run = simulate(inputs)
    assert sorted(run.trained + run.dropped) == sorted(set(run.drawn)) == list(range(len(set(run.drawn))))
    assert len(run.trained) == inputs["num_steps"] * inputs["groups_per_step"]
    assert run.buffer.parked == {}


@SETTINGS
@given(run_inputs(), st.data())
def test_resumable(inputs, data):
    run = simulate({**inputs, "num_steps": inputs["num_steps"] + 1})
    num_trained, state = data.draw(st.sampled_from(run.saves))
    before = [ticket for step in run.steps[:num_trained] for ticket in step]
    assert all(ticket < state["drawn"] for ticket in (*before, *state["skipped"]))
    options = dict(first_ticket=state["drawn"], skipped=state["skipped"])
    resumed = simulate(inputs, num_steps=inputs["num_steps"] + 1 - num_trained, **options)
    trained = before + resumed.trained
    assert len(trained) == len(set(trained))
    assert set(trained) == {ticket for ticket in run.keeps if ticket <= max(trained)}, "none is lost"


@SETTINGS
@given(run_inputs(keep_shares=(0.5, 0.3, 0.1)), st.integers(1, 4))
def test_draws_bounded(inputs, max_attempts):
    run = simulate({**inputs, "num_steps": 8}, max_attempts=max_attempts)
    most = (max_attempts - 1) * inputs["groups_per_step"]
    assert all(len(each.dropped) <= most for each in run.buffer._rounds) == (len(run.steps) == 8)
    assert run.buffer.step_metrics()["groups/dropped"] <= most


def test_short_groups_do_not_wait_for_long_ones_which_then_train_together():
    async def main():
        buffer = StragglerBuffer(groups_per_step=2, spare_groups=1, max_staleness=0, max_attempts=1, num_steps=6)
        parked: set[int] = set()
        order = []

        async def work(ticket):
            if ticket in parked or ticket % 3 == 0:
                parked.add(ticket)
                await asyncio.sleep(0.01)
            return make_group(ticket)

        async def produce():
            while True:
                ticket = await buffer.reserve()
                if (group := await buffer.unless_parked(ticket, work(ticket))) is not None:
                    buffer.fill(ticket, group)

        tasks = [asyncio.create_task(produce()) for _ in range(buffer.capacity)]
        for _ in range(6):
            order.append([group.prompt.index for group in await buffer.take(2)])
            buffer.release(2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return order

    order = asyncio.run(main())
    assert order[:3] == [[1, 2], [4, 5], [7, 8]]
    assert sorted(ticket for step in order[3:] for ticket in step)[:3] == [0, 3, 6]


@pytest.mark.parametrize(("num_steps", "tickets"), [(3, 5), (4, 6)])
def test_a_round_ahead_has_spare_groups_while_later_ones_can_train_all_that_are_put_off(num_steps, tickets):
    async def main():
        buffer = StragglerBuffer(groups_per_step=2, spare_groups=1, max_staleness=1, max_attempts=1, num_steps=num_steps)
        begun = []
        with contextlib.suppress(TimeoutError):
            while True:
                begun.append(await asyncio.wait_for(buffer.reserve(), 0.01))
        assert begun == [*range(tickets)]

    asyncio.run(main())


def test_a_ticket_that_is_parked_before_a_producer_has_it_is_handed_out_with_its_next_round():
    async def main():
        buffer = StragglerBuffer(groups_per_step=1, spare_groups=1, max_staleness=0, max_attempts=1, num_steps=2)
        assert await buffer.reserve() == 0
        buffer.fill(0, make_group(0))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(buffer.reserve(), 0.01)
        await buffer.take(1)
        buffer.release(1)
        assert await buffer.reserve() == 1
        buffer.fill(1, make_group(1))
        assert [group.prompt.index for group in await buffer.take(1)] == [1]

    asyncio.run(main())


def test_a_failure_wakes_everyone_with_its_cause():
    cause = OSError("engine gone")

    async def main():
        buffer = StragglerBuffer(groups_per_step=1, spare_groups=0, max_staleness=0, max_attempts=1, num_steps=3)
        await buffer.reserve()
        waiting = [asyncio.create_task(work) for work in (buffer.take(1), buffer.reserve(), buffer.reserve())]
        await asyncio.sleep(0)
        buffer.fail(cause)
        for error in await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 20):
            assert isinstance(error, MoerlError)
            assert error.__cause__ is cause

    asyncio.run(main())


def test_work_that_is_cancelled_from_without_or_within_is_not_taken_for_parked():
    async def main():
        buffer = StragglerBuffer(groups_per_step=1, spare_groups=0, max_staleness=0, max_attempts=1, num_steps=3)
        ticket = await buffer.reserve()

        async def cancels_itself():
            raise asyncio.CancelledError

        with pytest.raises(asyncio.CancelledError):
            await buffer.unless_parked(ticket, cancels_itself())
        outer = asyncio.create_task(buffer.unless_parked(ticket, asyncio.sleep(10)))
        await asyncio.sleep(0)
        outer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await outer

    asyncio.run(main())
