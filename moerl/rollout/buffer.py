"""The buffer in which every group that was begun is waited for: the oldest groups train first, and a straggler may be passed over by a
bounded number of younger ones (windowed FIFO).

Up to max_staleness * P groups, P = groups_per_step, may be trained between the draw of a group and its own step. Groups that are in flight
ahead of it use some of them up, and younger ones that pass it the others: num_slots + window = (max_staleness + 1) * P + 1. With all slots,
which is the default, the window is 1 and nothing passes; with fewer, groups are drawn later, so that most are less stale, and stragglers
have the time that is left.

Invariants, by the names of their tests:
* bounded: live tickets plus taken but unreleased groups never exceed num_slots.
* in_order: tickets are handed out in ascending order, `skipped` ones first. With window 1 they are taken in ascending order, whatever order
  groups finish in.
* window: while a ticket is live, fewer than `window` younger ones are taken. A step has the oldest finished groups that this allows.
* staleness: if groups are released only after the weights they trained were pushed, a group taken at trainer version v was
  reserved at version v - max_staleness or later. For when it was reserved, at version u, at most num_slots - 1 others were held, and the
  (v - u) * P groups taken in steps u to v - 1 are of these, or younger, of which fewer than `window` passed it:
  (v - u) * P <= num_slots + window - 2 < (max_staleness + 1) * P.
* never_stuck: `take` returns once num_groups live groups, and all older than those, have finished.
* resumable: `skipped` are the untrained tickets below the youngest one taken; from `drawn` on none was taken; every other one below was
  taken or dropped. A run that resumes with both trains every kept prompt once. Prompts above `drawn` are drawn again, dropped ones
  included: newer weights may now solve them. With window 1 nothing is skipped; with max_staleness=0 nothing is drawn when the trainer
  saves.
* draws_bounded: a step that can no longer find its groups within max_attempts * groups_per_step draws fails, and, with window 1, none
  fails earlier.
"""

import asyncio
from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Any

from moerl.rollout.ticket_buffer import TicketBuffer, outcome_of, too_many_drops
from moerl.types.groups import Group


class GroupBuffer(TicketBuffer):
    def __init__(
        self, *, groups_per_step: int, max_staleness: int, max_attempts: int, num_slots: int | None = None, first_ticket: int = 0,
        skipped: Iterable[int] = (),
    ):  # fmt: skip
        """`num_slots`: from groups_per_step to (max_staleness + 1) times as many, which None is. `skipped`: tickets below `first_ticket`
        that are still to be drawn."""
        super().__init__()
        self._groups_per_step, self._max_attempts, self._num_steps = groups_per_step, max_attempts, max_staleness + 1
        most = self._num_steps * groups_per_step
        self._num_slots = most if num_slots is None else num_slots
        assert groups_per_step <= self._num_slots <= most, f"{num_slots=} slots with {groups_per_step=} and {max_staleness=}"
        self.window = most - self._num_slots + 1
        self._skipped, self._next_ticket = deque(sorted(skipped)), first_ticket
        self._live: dict[int, Group | None] = {}  # ascending; None: still being produced
        self._passing: list[int] = []  # taken tickets younger than the oldest live one
        self._youngest_taken = first_ticket - 1
        self._dropped: dict[int, str] = {}  # ticket -> why, for tickets after the last one taken
        self._num_unreleased = 0
        self._num_dropped_by_last_take = 0
        self._free = asyncio.Semaphore(self._num_slots)

    @property
    def capacity(self) -> int:
        return self._num_slots

    def state(self) -> dict[str, Any]:
        return {
            "drawn": next((ticket for ticket in self._live if ticket > self._youngest_taken), self._next_ticket),
            "skipped": [ticket for ticket in (*self._live, *self._skipped) if ticket <= self._youngest_taken],
        }

    def step_metrics(self) -> dict[str, float]:
        return {"groups/dropped": float(self._num_dropped_by_last_take)}

    async def reserve(self) -> int:
        await self._free.acquire()
        if self._error is not None:
            self._free.release()  # wakes the next one in line, so that all of them raise
            raise self._error
        if self._skipped:
            ticket = self._skipped.popleft()
        else:
            ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        self._live[ticket] = None
        return ticket

    def fill(self, ticket: int, group: Group) -> None:
        assert self._live[ticket] is None, f"ticket {ticket} was filled twice"
        self._live[ticket] = group
        self._changed.set()

    def drop(self, ticket: int, group: Group) -> None:
        """Its slot is free at once."""
        assert self._live[ticket] is None, f"ticket {ticket} was filled before"
        del self._live[ticket]
        self._dropped[ticket] = outcome_of(group)
        self._free.release()
        self._check_draws()
        self._changed.set()

    async def take(self, num_groups: int) -> list[Group]:
        assert num_groups <= self.capacity - self._num_unreleased, f"{num_groups=} can never be ready: release the taken groups first"
        while (tickets := self._chosen(num_groups)) is None:
            self._changed.clear()
            await self._changed.wait()
        groups = [self._live.pop(ticket) for ticket in tickets]
        self._youngest_taken = max(self._youngest_taken, tickets[-1])
        oldest = next(iter(self._live), self._next_ticket)
        self._passing = [ticket for ticket in (*self._passing, *tickets) if ticket > oldest]
        later = {ticket: why for ticket, why in self._dropped.items() if ticket > tickets[-1]}
        self._num_dropped_by_last_take = len(self._dropped) - len(later)
        self._dropped = later
        self._num_unreleased += num_groups
        self._check_draws()
        return groups  # type: ignore[return-value]

    def release(self, num_groups: int) -> None:
        assert num_groups <= self._num_unreleased, f"{num_groups=} of {self._num_unreleased} taken groups"
        self._num_unreleased -= num_groups
        for _ in range(num_groups):
            self._free.release()

    def _wake_producers(self) -> None:
        self._free.release()

    def _chosen(self, num_groups: int) -> list[int] | None:
        """The oldest finished groups, unless too many of them would pass one that is not. No other choice passes it with fewer."""
        self._raise_error()
        tickets = list(islice((ticket for ticket, group in self._live.items() if group is not None), num_groups))
        if len(tickets) < num_groups:
            return None
        oldest = next((ticket for ticket, group in self._live.items() if group is None), self._next_ticket)
        num_passing = sum(ticket > oldest for ticket in (*self._passing, *tickets))
        return tickets if num_passing < self.window else None

    def _check_draws(self) -> None:
        """Fail if the first k steps in the buffer have dropped more than k steps may, for any k.

        Step k ends no earlier than the k * groups_per_step-th live ticket, as a live one may still be dropped; so what was dropped
        below that ticket certainly belongs to the first k steps.
        """
        if len(self._dropped) <= (self._max_attempts - 1) * self._groups_per_step:  # no step has lost too many: they need no counting
            return
        live = list(self._live)
        for step in range(1, self._num_steps + 1):
            num_groups = step * self._groups_per_step
            end = live[num_groups - 1] if len(live) >= num_groups else self._next_ticket
            dropped = [why for ticket, why in self._dropped.items() if ticket < end]
            if len(dropped) > (self._max_attempts - 1) * num_groups:
                self._stop(too_many_drops(dropped, self._max_attempts, num_groups))
