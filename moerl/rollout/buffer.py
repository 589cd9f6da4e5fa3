"""The bounded, ordered hand-off from the group producers to the trainer. One event loop, no polling, no tasks of its own.

A ticket is a prompt's index in the draw order. It is *live* from `reserve` until it is dropped or taken.

Invariants, by the names of their tests:
* bounded: live tickets plus taken but unreleased groups never exceed (max_staleness + 1) * groups_per_step.
* in_order: tickets are handed out in ascending order and taken in ascending order, whatever order groups finish in.
* staleness: if groups are released only after the weights they trained were pushed, a group taken at trainer version v was
  reserved at version v - max_staleness or later.
* resumable: below `oldest_untrained_ticket` every ticket was taken or dropped; from it on none was taken. A run that resumes with it
  as `first_ticket` trains every kept prompt once. Prompts above it are drawn again, dropped ones included: newer weights may now
  solve them. With max_staleness=0 there are none when the trainer saves.
* draws_bounded: a step that can no longer find its groups within max_attempts * groups_per_step draws fails, and none fails earlier.
"""

import asyncio
from collections import Counter
from itertools import islice

from moerl.types.errors import DynamicSamplingError, MoerlError
from moerl.types.groups import Group


class GroupBuffer:
    def __init__(self, *, groups_per_step: int, max_staleness: int, max_attempts: int, first_ticket: int = 0):
        self._groups_per_step, self._max_attempts, self._num_steps = groups_per_step, max_attempts, max_staleness + 1
        self._next_ticket = first_ticket
        self._live: dict[int, Group | None] = {}  # ascending; None: still being produced
        self._dropped: dict[int, str] = {}  # ticket -> why, for tickets after the last one taken
        self._num_unreleased = 0
        self._num_dropped_by_last_take = 0
        self._free = asyncio.Semaphore(self.capacity)
        self._changed = asyncio.Event()
        self._error: MoerlError | None = None

    @property
    def capacity(self) -> int:
        return self._num_steps * self._groups_per_step

    @property
    def oldest_untrained_ticket(self) -> int:
        """Place at which a resumed run goes on drawing. Groups count as trained once taken: read it after their update."""
        return next(iter(self._live), self._next_ticket)

    def step_metrics(self) -> dict[str, float]:
        """Groups that the last `take` passed over, for the observer."""
        return {"groups/dropped": float(self._num_dropped_by_last_take)}

    async def reserve(self) -> int:
        """Waits for a free slot and returns the next ticket; raises like `take` once the buffer failed."""
        await self._free.acquire()
        if self._error is not None:
            self._free.release()  # wakes the next one in line, so that all of them raise
            raise self._error
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        self._live[ticket] = None
        return ticket

    def fill(self, ticket: int, group: Group) -> None:
        """The ticket's group is ready to be trained on."""
        assert self._live[ticket] is None, f"ticket {ticket} was filled twice"
        self._live[ticket] = group
        self._changed.set()

    def drop(self, ticket: int, group: Group) -> None:
        """The ticket's group is not worth training on; its slot is free at once."""
        assert self._live[ticket] is None, f"ticket {ticket} was filled before"
        del self._live[ticket]
        self._dropped[ticket] = _outcome(group)
        self._free.release()
        self._check_draws()
        self._changed.set()

    async def take(self, num_groups: int) -> list[Group]:
        """The `num_groups` oldest live groups, in ticket order; waits until all of them are there. One caller at a time.

        Raises DynamicSamplingError, or MoerlError from the error given to `fail`.
        """
        assert num_groups <= self.capacity - self._num_unreleased, f"{num_groups=} can never be ready: release the taken groups first"
        while not self._is_ready(num_groups):
            self._changed.clear()
            await self._changed.wait()
        tickets = list(islice(self._live, num_groups))
        groups = [self._live.pop(ticket) for ticket in tickets]
        later = {ticket: why for ticket, why in self._dropped.items() if ticket > tickets[-1]}
        self._num_dropped_by_last_take = len(self._dropped) - len(later)
        self._dropped = later
        self._num_unreleased += num_groups
        self._check_draws()
        return groups  # type: ignore[return-value]

    def release(self, num_groups: int) -> None:
        """Frees the slots of taken groups; call it after the push of the weights they trained."""
        assert num_groups <= self._num_unreleased, f"{num_groups=} of {self._num_unreleased} taken groups"
        self._num_unreleased -= num_groups
        for _ in range(num_groups):
            self._free.release()

    def fail(self, error: BaseException) -> None:
        """Ends the hand-off: everyone who waits or comes later gets a MoerlError with `error` as its cause."""
        stopped = MoerlError(f"rollout stopped, because a group could not be produced: {type(error).__name__}: {error}")
        stopped.__cause__ = error
        self._stop(stopped)

    def _stop(self, error: MoerlError) -> None:
        if self._error is None:  # the first one is the cause of the others
            self._error = error
            self._free.release()
            self._changed.set()

    def _is_ready(self, num_groups: int) -> bool:
        if self._error is not None:
            raise self._error
        oldest = list(islice(self._live.values(), num_groups))
        return len(oldest) == num_groups and all(group is not None for group in oldest)

    def _check_draws(self) -> None:
        """Fail if the first k steps in the buffer have dropped more than k steps may, for any k.

        Step k ends no earlier than the k * groups_per_step-th live ticket, as a live one may still be dropped; so what was dropped
        below that ticket certainly belongs to the first k steps.
        """
        live = list(self._live)
        for step in range(1, self._num_steps + 1):
            num_groups = step * self._groups_per_step
            end = live[num_groups - 1] if len(live) >= num_groups else self._next_ticket
            dropped = [why for ticket, why in self._dropped.items() if ticket < end]
            if len(dropped) > (self._max_attempts - 1) * num_groups:
                self._stop(DynamicSamplingError(_explain(dropped, self._max_attempts, num_groups)))


def _outcome(group: Group) -> str:
    rewards = sorted(set(group.rewards_G.tolist()))
    if not rewards:
        return "had no sample that could be scored"
    if len(rewards) == 1:
        return f"scored {rewards[0]:g} for every sample"
    return "scored differently only in samples the algorithm leaves out"


def _explain(dropped: list[str], max_attempts: int, num_groups: int) -> str:
    counts = Counter(dropped).most_common()
    listed = "".join(f"\n    {count} of {len(dropped)} dropped groups {outcome}" for outcome, count in counts[:8])
    more = f"\n    {len(counts) - 8} more outcomes" if len(counts) > 8 else ""
    return (
        f"algorithm.max_attempts = {max_attempts}: dynamic sampling found fewer than {num_groups} usable groups in "
        f"{max_attempts * num_groups} draws{listed}{more}\n"
        "    why: equal rewards in a group give no gradient, so such groups are replaced, and replacing them has a bound\n"
        "    fix: lowest score everywhere: easier tasks, a supervised warm start (sft), a larger group_size, or a longer "
        "rollout.max_response_tokens; highest score everywhere: harder tasks; a mixture: a larger max_attempts"
    )
