"""Buckets among the trainer's ranks, for servers on their own nodes: a rank on the readers' node gets what another node's rank sends, over
a group of ranks alone (NCCL's between GPUs, gloo's over TCP on CPU), and lends it to them as it lends what it holds itself.

    rank that holds it --group--> rank on the readers' node (on the first reader's GPU) --its memory, mapped--> all readers of that node

NCCL joins no two processes of one GPU, which servers on the trainer's GPUs would be; so no server is in the group. In a round of the
schedule a rank sends one bucket, or lends one of its own, and gets one, both at once. It prepares a round while that before is on its way:

    fill the buffer to send, and wait until readers have left the one to receive -> the round before has come: lend it -> begin this round

Nobody waits for one that waits for it: a rank waits for what others do in earlier rounds alone, and for readers who have all of those.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from moerl.types.push import Bucket
from moerl.weights.transport.gpu_transport import DeviceBuffer, NcclGroup, Transfer
from moerl.weights.transport.links import Borrower, Lender, rank_key
from moerl.weights.transport.network_transport import GlooGroup, GroupJoin, join_group
from moerl.weights.transport.rendezvous import Deadline, explained
from moerl.weights.transport.shared_memory import NUM_BUFFERS, SharedBuffer, SharedReader, new_buffer

Pack = Callable[[int], tuple[torch.Tensor, str]]
"""(index of a bucket of the rank's job) -> its bytes, and what readers of the node find them by. The buffer was left by all."""


class _Round(NamedTuple):
    """A round that has begun."""

    number: int
    work: Any
    """Given by the group to wait for."""
    lent: Sequence[tuple[Bucket, str, int]]
    """Buckets that readers of the node get when it has ended, where they lie, and their slots of the lender."""


def as_reader(rank: int) -> int:
    """Number of a rank among the readers of a lender; those of servers count from 0."""
    return -1 - rank


class RankRelay:
    """One rank of the group. The constructor returns when all have joined."""

    def __init__(
        self, join: GroupJoin, lender: Lender, *, rank: int, job: Sequence[Bucket], relayed: Sequence[Bucket], members: Sequence[int]
    ):
        """`job`: buckets that the rank sends, to others or to readers of its node; `relayed`: those it gets from others. `lender`: to
        readers of its node, and to know of ranks that end. `members`: ranks of the group."""
        self._lender, self._members = lender, list(members)
        self._job = {bucket.round: bucket for bucket in job}
        self._relayed = {bucket.round: (number % NUM_BUFFERS, bucket) for number, bucket in enumerate(relayed)}
        self._slots: list[SharedBuffer | DeviceBuffer] = [new_buffer(join.device) for _ in range(NUM_BUFFERS if relayed else 0)]
        self._borrower = Borrower(SharedReader(), lambda bucket: rank_key(bucket.sender))  # of which it hears when a sender ends
        self._group: GlooGroup | NcclGroup | None = None
        try:
            senders = [rank_key(bucket.sender) for bucket in relayed]
            name = f"trainer rank {rank}"
            self._borrower.join(join.rendezvous, senders, reader=as_reader(rank), name=name, deadline=join.deadline)
            with explained(f"the trainer's ranks did not meet to relay weights: not all {len(members)} are at {join.host}"):
                self._group = join_group(join, rank=self._members.index(rank), world_size=len(members))
        except BaseException:
            self.close()
            raise

    def carry(self, pack: Pack, deadline: Deadline) -> None:
        """All buckets of a push: returns when what this rank sends was sent, and what it lends was read."""
        under_way: _Round | None = None
        for number in sorted({*self._job, *self._relayed}):
            sending = self._outgoing(number, pack, deadline)
            receiving = self._incoming(number, deadline)
            if under_way is not None:
                self._end(under_way, deadline)
            under_way = self._begin(number, sending, receiving)
        if under_way is not None:
            self._end(under_way, deadline)
        self._lender.drain(deadline)

    def rest(self) -> None:
        """Every bucket of a push was read: memory is given back."""
        for memory in self._slots:
            memory.release()

    def close(self) -> None:
        """Safe to call twice."""
        if self._group is not None:
            self._group.close()
        self._group = None
        self._borrower.close()
        for memory in self._slots:
            memory.close()

    def _outgoing(self, number: int, pack: Pack, deadline: Deadline) -> tuple[torch.Tensor, str] | None:
        if (bucket := self._job.get(number)) is None:
            return None
        self._lender.wait(_own_slot(bucket), deadline)
        return pack(bucket.index)

    def _incoming(self, number: int, deadline: Deadline) -> torch.Tensor | None:
        """Memory that nobody reads any more."""
        if number not in self._relayed:
            return None
        slot, bucket = self._relayed[number]
        self._lender.wait(slot, deadline)
        return self._slots[slot].reserve(bucket.num_bytes)[: bucket.num_bytes]

    def _begin(self, number: int, sending: tuple[torch.Tensor, str] | None, receiving: torch.Tensor | None) -> _Round:
        assert self._group is not None, "an error ends the push"
        own, others, out, into, lent = self._job.get(number), self._relayed.get(number), None, None, []
        if own is not None and sending is not None:
            if own.lender == own.sender:
                lent.append((own, sending[1], _own_slot(own)))
            else:
                out = Transfer(sending[0], self._members.index(own.lender), own.index)
        if others is not None and receiving is not None:
            slot, bucket = others
            lent.append((bucket, self._slots[slot].source, slot))
            into = Transfer(receiving, self._members.index(bucket.sender), bucket.index)
        with explained(f"round {number} of the weights that ranks relay could not begin"):
            work = self._group.begin(out, into)
        found = _Round(number, work, sorted(lent, key=lambda each: each[0].sender))
        if into is None:
            self._lend(found)
            return found._replace(lent=[])
        return found

    def _end(self, begun: _Round, deadline: Deadline) -> None:
        """The round is over the network: readers are told of what lies here, in the order in which all read."""
        assert self._group is not None, "an error ends the push"
        with explained(f"the bucket of round {begun.number} of the weights that ranks relay did not arrive"):
            self._group.wait(begun.work, deadline, self._check)
        self._lend(begun)

    def _lend(self, begun: _Round) -> None:
        for bucket, source, slot in begun.lent:
            self._lender.lend(bucket, source, bucket.readers, slot=slot)

    def _check(self) -> None:
        self._borrower.check()
        self._lender.check()


def _own_slot(bucket: Bucket) -> int:
    """Slot of the lender for a bucket of the rank's own job, whose buffers take turns too; those before are of relayed buckets."""
    return NUM_BUFFERS + bucket.index % NUM_BUFFERS


def readers_of(rank: int, job: Sequence[Bucket], relayed: Sequence[Bucket]) -> set[int]:
    """All that connect to a rank as a lender: processes on its node, and ranks that get buckets from it."""
    lent = (bucket for bucket in (*job, *relayed) if bucket.lender == rank)
    return {reader for bucket in lent for reader in bucket.readers} | {as_reader(bucket.lender) for bucket in job if bucket.lender != rank}
