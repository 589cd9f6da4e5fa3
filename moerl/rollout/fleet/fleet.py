"""The rollout servers and where each stands: a server that ends or does not answer is started anew, and serves again after a push.

    healthy --> suspect --> dead --> restarting --> stale --> (verified push) --> healthy
       ^-----------'  it answers again                ^-- every server begins here

healthy: requests go to it. suspect: it missed a probe, or broke off a request; it keeps its requests and gets no new ones. dead: it
ended, or is ended because it missed NUM_PROBES in a row or answered what cannot be right. One that ends more often than
rollout.max_restarts stays dead; the run goes on with the others, and ends, with what killed the last of them, when there are none.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from moerl.hangs.hang_reports import HangReports
from moerl.rollout.server.contract import RolloutEngine
from moerl.types.completion import ServerLoad, VersionSpan
from moerl.types.errors import EngineError, EngineUnavailable

logger = logging.getLogger(__name__)

NUM_PROBES = 3
LOSS_SECONDS = 5.0
"""Time after a failure that its cause may take to show: the end of a server is seen by its owner a moment later than by its clients."""

_NO_PUSHES: Mapping[str, str] = MappingProxyType({})

State = Literal["healthy", "suspect", "dead", "restarting", "stale"]
_RUNNING: tuple[State, ...] = ("healthy", "suspect", "stale")


@dataclass(eq=False, slots=True, kw_only=True)
class Member:
    engine: RolloutEngine
    state: State = "stale"
    trusted: State = "stale"
    """Its state before it became suspect."""
    num_in_flight: int = 0
    num_starts: int = 1
    gone: EngineError | None = None
    """Why it stays dead."""
    verdict: EngineError | None = None
    """Why it is to stay dead once it has ended."""
    is_lent: bool = False
    """Its GPUs are somebody else's for now: it gets no requests, and is not started."""
    is_starting: bool = False
    falsehood: EngineError | None = None
    """Answer for which it is being ended."""
    num_turns: int = 0
    """Times that it got weights, or its GPUs back."""

    @property
    def name(self) -> str:
        return self.engine.name


class Fleet:
    """Owned by one event loop."""

    def __init__(self, engines: Sequence[RolloutEngine], *, max_restarts: int, probe_seconds: float, hangs: HangReports | None = None):
        """`max_restarts` of each server. `probe_seconds`: between two probes, and for one to be answered. `hangs`: where the stacks of a
        server go before it is ended for its silence; None: nowhere."""
        self._hangs = hangs
        self.phase: Literal["rollout", "push"] = "rollout"
        """Work that a server which hangs was to do."""
        self.members = tuple(Member(engine=engine) for engine in engines)
        self._max_restarts, self._probe_seconds = max_restarts, probe_seconds
        self._watches: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self.on_change: list[Callable[[], None]] = []
        """Called after every change of a server's state."""
        self.on_load: list[Callable[[Member, ServerLoad], None]] = []
        """Called with the load that a server reports to a probe."""
        self._pushed: dict[str, tuple[int, Member]] = {}

    @property
    def num_restarts(self) -> int:
        """Number of all servers' restarts so far."""
        return sum(member.num_starts - 1 for member in self.members)

    @property
    def num_retired(self) -> int:
        return sum(member.verdict is not None for member in self.members)

    def watch(self) -> None:
        """Begin to watch: from here on servers are probed and restarted. All of them must have started."""
        self._watches = [asyncio.create_task(self._watch(member)) for member in self.members]
        for watch in self._watches:
            watch.add_done_callback(lambda _: self._tell())

    async def close(self) -> None:
        """Restarts nothing any more; the servers are the caller's to close."""
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)

    def running(self) -> list[Member]:
        """Those that answer, or should."""
        return [member for member in self.members if member.state in _RUNNING]

    def served(self, members: Collection[Member], *, version: int = 0, push_ids: Mapping[str, str] = _NO_PUSHES) -> None:
        """They have these weights now, by pushes with these nonces (none: they loaded them by themselves, and their completions are not
        asked for a push). Those that died meanwhile stay what they are."""
        self._pushed |= {push_ids[member.name]: (version, member) for member in members if push_ids}
        for member in members:
            member.num_turns += 1
            if member.state in ("stale", "suspect"):
                self._enter(member, "healthy")

    def servers_of(self, version: int) -> dict[str, int]:
        """Numbers of the servers to which this version was pushed, by the nonce of the push."""
        return {push_id: self.members.index(member) for push_id, (pushed, member) in self._pushed.items() if pushed == version}

    def owners(self, spans: Iterable[VersionSpan]) -> set[Member]:
        """Servers that sampled them, as far as they name pushes."""
        return {self._pushed[span.push_id][1] for span in spans if span.push_id in self._pushed}

    def trusted(self) -> set[Member]:
        """Those that serve, or will again."""
        return {member for member in self.members if member.gone is None and member.verdict is None}

    def forget_pushes(self, *, before: int) -> None:
        """Pushes of older versions, of which nothing is in flight."""
        self._pushed = {push_id: pushed for push_id, pushed in self._pushed.items() if pushed[0] >= before}

    def false_span(self, spans: Sequence[VersionSpan], member: Member | None) -> str:
        """Fault of the spans of a completion; empty if each names a push of its version. `member`: whom the last comes from; None: from one
        that was asked before."""
        if not spans or not self._pushed:
            return ""
        for span in spans:
            if span.push_id not in self._pushed or self._pushed[span.push_id][0] != span.version:
                return f"{span.num_tokens} tokens are said to be of weights of version {span.version}, which no push of this run brought so"
        owner = self._pushed[spans[-1].push_id][1]
        return "" if member in (owner, None) else f"its last tokens are said to be of weights that were pushed to {owner.name}"

    def retire(self, member: Member, error: EngineError) -> None:
        """End it for good: what it answers cannot be trusted, and a new start would not change that. The run goes on with the others."""
        if member.verdict is None:
            logger.error("%s is retired: %s", member.name, error)
            member.verdict = error
            member.engine.kill()
            self._enter(member, "dead")  # no more requests from here on; its watch learns of the end in a moment

    def refused(self, member: Member, *, turn: int) -> bool:
        """It says that it may not serve, to a request of that `num_turns`: no more requests before the next push. False, and nothing, for
        one that was on its way when the turn ended, as to a server that then slept."""
        if member.is_lent or member.num_turns != turn:
            return False
        if member.state == "healthy":
            self._enter(member, "stale")
        return True

    def broke_off(self, member: Member) -> None:
        """A request failed without the server's word for it: no more requests before it ended, as mostly, or answers a probe."""
        if member.state == "healthy":
            self._suspect(member)

    def answered_falsely(self, member: Member, error: EngineError, *, starts: int) -> None:
        """Its answer, as the process of that `num_starts`, cannot be right. It is ended and started again, as one that hangs."""
        if member.num_starts == starts and member.state in _RUNNING and member.falsehood is None:
            member.falsehood = error
            self.broke_off(member)
            member.engine.kill()

    def healthy(self) -> list[Member]:
        """Those that serve."""
        return [member for member in self.members if member.state == "healthy" and not member.is_lent]

    def serving(self) -> list[Member]:
        """The same, and those of which that is in doubt."""
        return [member for member in self.members if member.state in ("healthy", "suspect") and not member.is_lent]

    async def lend(self, members: Collection[Member]) -> None:
        """Until `take_back` they get no requests, and one that ends is not started again. Returns when none is being started."""
        for member in members:
            member.is_lent = True
        self._tell()
        while any(member.is_starting for member in members):
            await self._changed.wait()

    def take_back(self, members: Collection[Member]) -> None:
        for member in members:
            member.is_lent = False
            member.num_turns += 1
        self._tell()

    def check(self) -> None:
        """EngineError if none will ever serve again."""
        for watch in self._watches:
            if watch.done() and not watch.cancelled():
                watch.result()  # it ends by itself with a server that stays dead; anything else must reach the run
        gone = [member.gone for member in self.members if member.gone is not None]
        if len(gone) == len(self.members):  # the last words of the one that is first in the configuration
            raise EngineError(f"no rollout server is left (rollout.max_restarts = {self._max_restarts}): {gone[0]}") from gone[0]

    def stale(self) -> list[Member]:
        """Those that run and wait for weights."""
        return [member for member in self.members if member.state == "stale"]

    async def until_stale(self) -> None:
        """Returns when one waits for weights."""
        while not self.stale():
            self.check()
            await self._changed.wait()

    async def lost(self, members: Mapping[Member, int]) -> bool:
        """True if one of them, with its num_starts at the time, has ended since; waits a moment for the news."""

        def has_ended() -> bool:
            return any(member.num_starts != starts or member.state not in _RUNNING for member, starts in members.items())

        try:
            async with asyncio.timeout(LOSS_SECONDS):
                while not has_ended():
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    # -- one server --------------------------------------------------------------------------------------------

    async def _watch(self, member: Member) -> None:
        while True:
            error: EngineError | None = await self._end_of(member)
            while error is not None:
                self._enter(member, "dead")
                verdict = member.verdict
                if verdict is None and member.num_starts > self._max_restarts:
                    logger.error("not restarted, rollout.max_restarts = %d: %s", self._max_restarts, error)
                    verdict = error
                if verdict is not None:
                    member.gone = verdict
                    self._tell()
                    return
                logger.warning("restart %d of %d: %s", member.num_starts, self._max_restarts, error)
                error = await self._restart(member)

    async def _end_of(self, member: Member) -> EngineError:
        """Why it has ended, or must."""
        ended, probed = asyncio.ensure_future(member.engine.ended()), asyncio.ensure_future(self._misses(member))
        try:
            done, _ = await asyncio.wait({ended, probed}, return_when=asyncio.FIRST_COMPLETED)
            error, falsehood = (ended if ended in done else probed).result(), member.falsehood
            member.falsehood = None
            return error if falsehood is None else falsehood
        finally:
            ended.cancel()
            probed.cancel()

    async def _misses(self, member: Member) -> EngineError:
        num_missed = 0
        while num_missed < NUM_PROBES:
            await asyncio.sleep(self._probe_seconds)
            if await self._answers(member):
                if member.state == "suspect":
                    self._enter(member, member.trusted)
                num_missed = 0
                continue
            num_missed += 1
            if member.state != "suspect":
                self._suspect(member)
        return await self._hung(member)

    async def _hung(self, member: Member) -> EngineError:
        error = EngineUnavailable(f"{member.name}: no answer to {NUM_PROBES} probes of {self._probe_seconds:g} s; it hangs")
        if self._hangs is not None:
            watched, deadline = member.engine.watched, f"{NUM_PROBES} probes of {self._probe_seconds:g} s (deadlines.probe_seconds)"
            hang = await self._hangs.report(self.phase, deadline, watched=watched, silent=[each.name for each in watched])
            error = EngineUnavailable(f"{error}\n{hang}")
            error.__cause__, error.origin = hang, hang.origin
        member.engine.kill()  # it would hear no SIGTERM
        return error

    async def _answers(self, member: Member) -> bool:
        try:
            async with asyncio.timeout(self._probe_seconds):
                health = await member.engine.health()
        except (EngineError, TimeoutError):
            return False
        for call in self.on_load:
            call(member, health.load)
        return True

    async def _restart(self, member: Member) -> EngineError | None:
        """Why it could not be started, on the node that it had, or, once it is retired, must not be."""
        self._enter(member, "restarting")
        member.num_starts += 1
        await member.engine.close()
        while member.is_lent and member.verdict is None:  # a server takes its GPUs' memory when it starts
            await self._changed.wait()
        if member.verdict is not None:
            return member.verdict
        member.is_starting = True
        try:
            await member.engine.start()
        except EngineError as error:
            return error
        finally:
            member.is_starting = False
            self._tell()
        if member.verdict is not None:
            member.engine.kill()  # there may have been nothing to end when it was retired
            return member.verdict
        self._enter(member, "stale")
        return None

    # -- changes -----------------------------------------------------------------------------------------------

    def _suspect(self, member: Member) -> None:
        member.trusted = member.state
        self._enter(member, "suspect")

    def _enter(self, member: Member, state: State) -> None:
        logger.info("%s: %s -> %s", member.name, member.state, state)
        member.state = state
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        for call in self.on_change:
            call()
