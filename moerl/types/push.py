"""Parts of one weight push, as it crosses processes."""

from dataclasses import dataclass, field
from typing import Literal

Transport = Literal["ipc", "nccl", "disk", "relay"]
"""relay: over a group of the trainer's ranks alone, which lend to the servers of their nodes as ipc does. Servers on the trainer's GPUs
over several nodes take it, in place of nccl, which joins no two processes of one GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor under its Hugging Face checkpoint name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As torch prints it, without "torch.": "float32", "bfloat16"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of a tensor, as one rank of the trainer sends it. The pieces of a tensor are disjoint and make it up."""

    start: tuple[int, ...]
    """In the tensor, along every axis."""
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    """Ranks of the trainer: each holds it, digests what it holds, and sends it, to different readers."""
    digest: str
    """xxh3_128 of its row-major bytes as these ranks computed it, hex."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything one push will bring. An engine refuses it before any byte moves."""

    version: int
    tensors: tuple[TensorSpec, ...]
    pieces: dict[str, tuple[Piece, ...]]
    """By the tensor's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketEntry:
    """Where a piece lies in a bucket."""

    name: str
    """Name of its tensor."""
    start: tuple[int, ...]
    shape: tuple[int, ...]
    """The piece's."""
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Some pieces that one trainer rank sends to the same readers, end to end in one buffer."""

    sender: int
    """The trainer's rank."""
    index: int
    """Among the sender's."""
    num_bytes: int
    entries: tuple[BucketEntry, ...]
    readers: tuple[int, ...]
    """Model processes of the rollout, counted over all servers. Over a network the first gets it from the sender; the others are on its
    node and then read it in its memory."""
    round: int = 0
    """Round of the schedule (weights/plan/buckets.py)."""
    relay: int | None = None
    """relay: the trainer rank on the readers' node that has it for them, and gets it from the sender if it is not the sender."""

    @property
    def lender(self) -> int:
        """Trainer rank in whose memory, or files, readers find it, but over nccl."""
        return self.sender if self.relay is None else self.relay


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportOffer:
    """How one server reaches the senders, and what they will send it in every push."""

    transport: Transport
    address: str
    """host:port of the store at which all meet."""
    server: str
    """Its name, for errors."""
    senders: tuple[int, ...]
    """Ranks of the trainer, ascending."""
    num_readers: int
    """Model processes of all servers."""
    reader: int
    """Number of the server's first model process in Bucket.readers; the others follow."""
    buckets: tuple[Bucket, ...]
    """Those that its processes read, in the order in which all go through them (weights/plan/buckets.py)."""
    seconds: float
    """How long one call may wait for other sides."""
    secret: str = field(repr=False)
    """Key of the RunSecret that all sides prove to each other, made anew whenever they meet."""


Needs = tuple[tuple[str, ...], ...]
"""The names of the tensors that each model process of a server must get."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushStats:
    """Figures of one push that succeeded."""

    version: int
    num_tensors: int
    num_bytes: int
    """Sent by all ranks, with padding."""
    num_buckets: int
    num_senders: int
    seconds: float
    """From the plan, if there was none yet, until every receiver serves the version."""
    num_written: int = 0
    """disk: bytes of its files."""
    push_ids: dict[str, str] = field(default_factory=dict, repr=False)
    """Nonce of each receiver, by its name."""
    num_network: int = 0
    """nccl, relay: bytes of tensors that crossed the network, once to every node that reads them (relay: and holds them not)."""
