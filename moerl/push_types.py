"""What one weight push consists of, as it crosses processes."""

from dataclasses import dataclass, field
from typing import Literal

Transport = Literal["shm", "gloo", "disk"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor under its Hugging Face checkpoint name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As torch prints it, without "torch.": "float32", "bfloat16"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a tensor of a push comes from."""

    digest: str
    """xxh3_128 of its bytes as the rank computed it that holds it, hex."""
    ranks: tuple[int, ...]
    """The trainer's ranks whose shards make the tensor; the first computed the digest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything one push will bring. An engine refuses it before any byte moves."""

    version: int
    tensors: tuple[TensorSpec, ...]
    origins: dict[str, Origin] = field(default_factory=dict)
    """By name. Tensors that no rank holds as a whole, such as stacks of experts, have none: rank 0 digests them when it packs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketEntry:
    """Where one tensor lies in a bucket, and what its bytes must hash to."""

    name: str
    offset: int
    num_bytes: int
    digest: str
    """xxh3_128 of the bytes, hex."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Some tensors of a push, end to end in one buffer."""

    index: int
    num_bytes: int
    entries: tuple[BucketEntry, ...]
    source: str
    """shm: a path that maps the sender's memory (/proc/PID/fd/N). gloo: empty. disk: the bucket's file."""
    num_written: int = 0
    """disk: bytes of that file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportOffer:
    """How one receiver reaches the sender."""

    transport: Transport
    address: str = ""
    """gloo: host:port of the sender's TCPStore. disk: the directory of its files."""
    rank: int = 0
    """gloo: this receiver's rank; the sender is 0."""
    world_size: int = 1
