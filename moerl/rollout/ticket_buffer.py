"""Base of the buffers between group producers and the trainer: moerl/rollout/buffer.py, where every group that was begun is waited for, and
moerl/rollout/straggler_buffer.py, where those that take long are put off. One event loop, no polling, no tasks of its own.

A ticket is a prompt's index in the draw order. It is *live* from `reserve` until it is dropped or taken.
"""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

import numpy as np

from moerl.algorithms.advantages import is_rounding
from moerl.types.errors import DynamicSamplingError, MoerlError
from moerl.types.groups import Group


class TicketBuffer(Protocol):
    """Bounded way of groups to the trainer."""

    _error: MoerlError | None
    _changed: asyncio.Event
    """Signal to `take`: groups came, or an error."""

    def __init__(self) -> None:
        self._error, self._changed = None, asyncio.Event()

    @property
    def capacity(self) -> int:
        """Most groups that are held at a time: live, or taken and not released."""

    def state(self) -> dict[str, Any]:
        """Place at which a resumed run goes on drawing, for a checkpoint: `drawn`, the first ticket of those it draws in order, and
        `skipped`, the earlier ones it draws before. Groups count as trained once taken: read it after their update."""

    def step_metrics(self) -> dict[str, float]:
        """Metrics of the last `take`, for the observer."""

    async def reserve(self) -> int:
        """Waits for a free slot and returns the next ticket; raises like `take` once the buffer failed."""

    def fill(self, ticket: int, group: Group) -> None:
        """The ticket's group is ready to be trained on."""

    def drop(self, ticket: int, group: Group) -> None:
        """The ticket's group is not worth training on; another one may be drawn at once."""

    async def take(self, num_groups: int) -> list[Group]:
        """Groups of a step, in ticket order; waits until all of them are there. One caller at a time.

        Raises DynamicSamplingError, or MoerlError from the error given to `fail`.
        """

    def release(self, num_groups: int) -> None:
        """Frees the slots of taken groups; call it after the push of the weights they trained."""

    async def unless_parked(self, ticket: int, work: Coroutine[Any, Any, Group]) -> Group | None:
        """The group that `work` makes for the ticket. None: it was put off, and will be reserved again."""
        return await work

    def fail(self, error: BaseException) -> None:
        """Ends the hand-off: everyone who waits or comes later gets a MoerlError with `error` as its cause."""
        stopped = MoerlError(f"rollout stopped, because a group could not be produced: {type(error).__name__}: {error}")
        stopped.__cause__ = error
        self._stop(stopped)

    def _stop(self, error: MoerlError) -> None:
        if self._error is None:  # the first one is the cause of the others
            self._error = error
            self._wake_producers()
            self._changed.set()

    def _wake_producers(self) -> None:
        """Those in `reserve`, to raise."""

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


def outcome_of(group: Group) -> str:
    """Words for why a group was dropped."""
    rewards = group.rewards_G
    if not len(rewards):
        return "had no sample that could be scored"
    if group.lacks_greedy:
        return "had no reward at temperature 0, with which its samples are compared"
    if is_rounding(np.ptp(rewards), rewards):
        return f"scored {rewards[0]:g} for every sample"
    return "scored differently only in samples the algorithm leaves out"


def too_many_drops(dropped: Sequence[str], max_attempts: int, num_groups: int) -> DynamicSamplingError:
    """Error of a step that cannot find `num_groups`; `dropped`: the outcome of each group it lost."""
    counts = Counter(dropped).most_common()
    listed = "".join(f"\n    {count} of {len(dropped)} dropped groups {outcome}" for outcome, count in counts[:8])
    more = f"\n    {len(counts) - 8} more outcomes" if len(counts) > 8 else ""
    return DynamicSamplingError(
        f"algorithm.max_attempts = {max_attempts}: dynamic sampling found fewer than {num_groups} usable groups in "
        f"{max_attempts * num_groups} draws{listed}{more}\n"
        "    why: equal rewards in a group give no gradient, so such groups are replaced, and replacing them has a bound\n"
        "    fix: lowest score everywhere: easier tasks, a supervised warm start (sft), a larger group_size, or a longer "
        "rollout.max_response_tokens; highest score everywhere: harder tasks; a mixture: a larger max_attempts"
    )
