"""Production of groups in the background: the buffer of a run is kept full, and what the algorithm does not keep is replaced."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from moerl.algorithms.algorithm import Algorithm
from moerl.config.schema.run_config import RunConfig
from moerl.rollout.buffer import GroupBuffer
from moerl.rollout.group_runner import GroupRunner
from moerl.rollout.prompts import PromptSource
from moerl.rollout.straggler_buffer import StragglerBuffer
from moerl.rollout.ticket_buffer import TicketBuffer
from moerl.types.errors import MoerlError
from moerl.types.groups import Group


def new_buffer(config: RunConfig, algorithm: Algorithm, state: Mapping[str, Any], first_version: int) -> TicketBuffer:
    """The buffer that continues from `state` of a checkpoint; empty at the start of a run."""
    options: dict[str, Any] = dict(
        groups_per_step=config.groups_per_step,
        max_staleness=config.max_staleness,
        max_attempts=algorithm.config.max_attempts,
        first_ticket=state.get("drawn", 0),
        skipped=state.get("skipped", ()),
    )
    if config.spare_groups:
        return StragglerBuffer(spare_groups=config.spare_groups, num_steps=config.num_steps - first_version, **options)
    return GroupBuffer(num_slots=config.groups_in_flight, **options)


@asynccontextmanager
async def producing(
    config: RunConfig, algorithm: Algorithm, prompts: PromptSource, runner: GroupRunner, buffer: TicketBuffer
) -> AsyncIterator[None]:
    """Keep the buffer full in the background, one task per slot. A task that fails fails the next `take`."""

    def settle(ticket: int, group: Group | None) -> None:
        # A function of its own: a name of the loop below would hold the group, and its samples in the object store, until the next one.
        if group is not None:
            (buffer.fill if algorithm.keeps_group(group) else buffer.drop)(ticket, group)

    async def produce() -> None:
        while True:
            ticket = await buffer.reserve()
            settle(ticket, await buffer.unless_parked(ticket, runner.run(prompts.prompt_at(ticket))))

    is_over = False

    def report(task: "asyncio.Task[None]") -> None:
        if task.cancelled():
            if not is_over:  # its slot would stay empty, and `take` wait for it
                buffer.fail(MoerlError("a task that draws samples was cancelled from within: a bug of moerl"))
        elif (error := task.exception()) is not None:
            buffer.fail(error)

    tasks = [asyncio.create_task(produce()) for _ in range(buffer.capacity)]
    for task in tasks:
        task.add_done_callback(report)
    try:
        yield
    finally:
        is_over = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
