"""The buffer in which stragglers are put off: a round begins more groups than a step trains, the first that finish train, and the others
are parked until there is a round's worth of them, which then begins anew, with the weights of that time (long rounds, as of RollPacker).

So short groups do not wait for long ones, and long ones share their waiting; no sample is older than max_staleness, for what was sampled of
a parked group is thrown away. Its prompt is not. A long round has spare groups as any other, so that the longest of the long are put
off once more, MAX_PARKS times at most.

Invariants, by the names of their tests; P = groups_per_step:
* bounded: live tickets plus taken but unreleased groups never exceed (max_staleness + 1) * (P + spare_groups).
* first_finished: a step trains the first P kept groups that finish of its round, and a round holds P + spare_groups tickets at most.
* staleness: if groups are released only after the weights they trained were pushed, round r begins when step r - max_staleness - 1 is
  released, and step r trains it: its groups were reserved at version r - max_staleness or later.
* patience: a ticket is parked at most MAX_PARKS times, and a run that was not resumed never has more than
  MAX_PARKS * (P + spare_groups) + max_staleness * spare_groups that are.
* complete: at the end of the run every ticket that was drawn was trained or dropped, so that no length is preferred: a round parks groups
  only if the rounds that begin after it can train all that are parked.
* resumable: as in moerl/rollout/buffer.py. Parked tickets, and those of rounds that have not trained, are skipped ones where a younger one
  trained; a resumed run treats them as parked once.
* draws_bounded: a round fails once it has dropped more than (max_attempts - 1) * P groups.
"""

import asyncio
from collections import deque
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from moerl.rollout.ticket_buffer import TicketBuffer, outcome_of, too_many_drops
from moerl.types.groups import Group

MAX_PARKS = 3
"""300 steps of 32 groups of 8 with lognormal lengths, 8 spare ones and slots for all, take at staleness 1 0.43 of the synchronous time with
1, 0.34 with 2, 0.31 with 3, 0.30 with 5; every further time multiplies the steps that the longest wait."""


@dataclass(eq=False, slots=True, kw_only=True)
class _Round:
    num_parks: int
    """Times that its groups were parked before; the most often of them."""
    unfinished: set[int]
    groups: dict[int, Group] = field(default_factory=dict)
    """Kept ones, as they finish."""
    dropped: list[str] = field(default_factory=list)
    parked: list[int] = field(default_factory=list)


class StragglerBuffer(TicketBuffer):
    def __init__(
        self, *, groups_per_step: int, spare_groups: int, max_staleness: int, max_attempts: int, num_steps: int, first_ticket: int = 0,
        skipped: Iterable[int] = (),
    ):  # fmt: skip
        """`num_steps` that are left of the run. `skipped`: tickets below `first_ticket` that are still to be drawn."""
        super().__init__()
        self._groups_per_step, self._num_spare, self._max_attempts = groups_per_step, spare_groups, max_attempts
        self._num_ahead, self._num_to_begin = max_staleness, num_steps
        self._next_ticket, self._youngest_taken = first_ticket, first_ticket - 1
        self._parked: list[list[int]] = [[] for _ in range(MAX_PARKS + 1)]  # by the times they were
        self._parked[1] = sorted(skipped)
        self._rounds: deque[_Round] = deque()  # begun and not taken
        self._begun: deque[tuple[int, _Round]] = deque()  # not reserved yet
        self._live: dict[int, _Round] = {}
        self._work: dict[int, asyncio.Task[Group]] = {}
        self._has_begun = asyncio.Event()
        self._num_unreleased = 0
        self._last_taken = _Round(num_parks=0, unfinished=set())
        for _ in range(max_staleness + 1):
            self._begin()

    @property
    def capacity(self) -> int:
        return (self._num_ahead + 1) * (self._groups_per_step + self._num_spare)

    @property
    def parked(self) -> dict[int, int]:
        """Tickets -> how often they were parked."""
        return {ticket: times for times, tickets in enumerate(self._parked) for ticket in tickets}

    def state(self) -> dict[str, Any]:
        untrained = {*self.parked, *(ticket for each in self._rounds for ticket in (*each.unfinished, *each.groups))}
        later = [ticket for ticket in untrained if ticket > self._youngest_taken]
        return {
            "drawn": min(later, default=self._next_ticket),
            "skipped": sorted(untrained.difference(later)),
        }

    def step_metrics(self) -> dict[str, float]:
        return {"groups/dropped": float(len(self._last_taken.dropped)), "groups/parked": float(len(self._last_taken.parked))}

    async def reserve(self) -> int:
        while not self._begun or self._error is not None:
            self._raise_error()
            self._has_begun.clear()
            await self._has_begun.wait()
        ticket, its_round = self._begun.popleft()
        self._live[ticket] = its_round
        return ticket

    async def unless_parked(self, ticket: int, work: Coroutine[Any, Any, Group]) -> Group | None:
        task = self._work[ticket] = asyncio.ensure_future(work)
        try:
            group = await task
        except asyncio.CancelledError:
            whoever = asyncio.current_task()
            if self._work.get(ticket) is task or whoever is None or whoever.cancelling():
                raise
            return None
        return group if self._work.get(ticket) is task else None

    def fill(self, ticket: int, group: Group) -> None:
        its_round = self._end(ticket)
        its_round.groups[ticket] = group
        if len(its_round.groups) == self._groups_per_step:
            self._park(its_round)
            self._changed.set()

    def drop(self, ticket: int, group: Group) -> None:
        """Its round gets another ticket at once."""
        its_round = self._end(ticket)
        its_round.dropped.append(outcome_of(group))
        if len(its_round.dropped) > (self._max_attempts - 1) * self._groups_per_step:
            self._stop(too_many_drops(its_round.dropped, self._max_attempts, self._groups_per_step))
        self._add(its_round, self._draw(1))

    async def take(self, num_groups: int) -> list[Group]:
        assert num_groups == self._groups_per_step, f"{num_groups=} of rounds that train {self._groups_per_step}"
        assert self._rounds, "no round is in flight: release the taken groups first"
        while len(self._rounds[0].groups) < num_groups:
            self._raise_error()
            self._changed.clear()
            await self._changed.wait()
        self._raise_error()
        taken = self._last_taken = self._rounds.popleft()
        groups, taken.groups = sorted(taken.groups.items()), {}
        self._youngest_taken = max(self._youngest_taken, groups[-1][0])
        self._num_unreleased += num_groups
        return [group for _, group in groups]

    def release(self, num_groups: int) -> None:
        assert num_groups == self._num_unreleased, f"{num_groups=} of {self._num_unreleased} taken groups"
        self._num_unreleased = 0
        self._begin()

    def _wake_producers(self) -> None:
        self._has_begun.set()

    # -- rounds ------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """The next round, if the run has one more: of tickets that were parked as often, of new ones, or at its end of what is left."""
        if self._num_to_begin == 0:
            return
        self._num_to_begin -= 1
        size, spare = self._groups_per_step, self._num_spare
        num_put_off = len(self.parked) + sum(max(len(each.unfinished) + len(each.groups) - size, 0) for each in self._rounds)
        # Rounds that begin once those of this one are known can train no more.
        room = max(self._num_to_begin - self._num_ahead, 0) * size
        full = [times for times in range(1, MAX_PARKS + 1) if len(self._parked[times]) >= size + (spare if times < MAX_PARKS else 0)]
        if full and num_put_off - size <= room:
            num_parks, tickets = full[-1], self._unpark(size + (spare if full[-1] < MAX_PARKS else 0), full[-1:])
        elif not full and num_put_off + spare <= room:
            num_parks, tickets = 0, self._draw(size + spare)
        else:
            num_parks, tickets = MAX_PARKS, self._unpark(size, range(MAX_PARKS, 0, -1))
            tickets += self._draw(size - len(tickets))
        self._rounds.append(_Round(num_parks=num_parks, unfinished=set()))
        self._add(self._rounds[-1], tickets)

    def _add(self, its_round: _Round, tickets: list[int]) -> None:
        its_round.unfinished |= set(tickets)
        self._begun += [(ticket, its_round) for ticket in sorted(tickets)]
        self._has_begun.set()

    def _draw(self, num: int) -> list[int]:
        self._next_ticket += num
        return list(range(self._next_ticket - num, self._next_ticket))

    def _unpark(self, num: int, times: Iterable[int]) -> list[int]:
        """At most `num`, those of the first of `times` first, and the oldest of each."""
        tickets: list[int] = []
        for each in times:
            parked = self._parked[each]
            taken, self._parked[each] = parked[: num - len(tickets)], parked[num - len(tickets) :]
            tickets += taken
        return tickets

    def _end(self, ticket: int) -> _Round:
        its_round = self._live.pop(ticket)
        its_round.unfinished.remove(ticket)
        self._work.pop(ticket, None)
        return its_round

    def _park(self, its_round: _Round) -> None:
        """Those that are unfinished: the round has its groups."""
        its_round.parked = sorted(its_round.unfinished)
        its_round.unfinished.clear()
        self._begun = deque(each for each in self._begun if each[1] is not its_round)
        self._parked[min(its_round.num_parks + 1, MAX_PARKS)] += its_round.parked
        for ticket in its_round.parked:
            self._live.pop(ticket, None)
            if ticket in self._work:
                self._work.pop(ticket).cancel()
