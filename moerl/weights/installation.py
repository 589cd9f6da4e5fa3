"""Tensors of one push on their way into a model: pieces are loaded as they come, or joined where the engine's loader wants a tensor whole,
and compared with what the trainer sent where they then lie."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch

from moerl.types.errors import WeightError
from moerl.types.push import BucketEntry, Manifest, Piece, TensorSpec
from moerl.weights.plan.spec_tensors import CPU, box_of, torch_dtype, view_as
from moerl.weights.plan.tensor_specs import first_few
from moerl.weights.verify.diagnose import Installed, describe_absent, explain_damage
from moerl.weights.verify.digest import tensor_digest
from moerl.weights.verify.places import Part, Place, Start, parts_of

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

DEVICE_BYTES = 2 * 256 * 2**20
"""Two buckets of weights.bucket_bytes as it is by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """How tensors get into a model."""

    load: Callable[[str, Start, torch.Tensor], Sequence[Place] | None]
    """(name of a tensor in checkpoints, where a piece of it begins, the piece): copies into the model what this process holds of it, and
    returns where that lies, possibly with all else that it holds of the tensor. The piece's memory is the sender's or the network's: it
    must not be kept. A tensor that is taken whole is one piece, in memory that may be kept; None: it is, and is copied later, after which
    WeightSession.verify must be called."""
    takes_whole: Callable[[str], bool] = lambda name: False
    """Whether `load` takes no pieces of a tensor."""
    settle: Callable[[], None] = lambda: None
    """Called when everything has come, before the push is finished."""


class Assembly:
    """Memory of one push, in which tensors that come in pieces and are loaded whole are put together.

    A batch is on its way at once, and an embedding or output layer by itself has gigabytes in large models (docs/benchmarks.md), which a
    GPU full of weights and caches has not. So a device lends no more than two buckets; the rest waits in host memory and crosses to it
    when whole.
    """

    def __init__(self, *, device_bytes: int = DEVICE_BYTES):
        """`device_bytes`: at most so many are on a device at a time."""
        self._left = device_bytes

    def empty(self, spec: TensorSpec, device: torch.device) -> torch.Tensor:
        """Memory for the whole tensor, whose pieces arrive on `device`: there, or in host memory."""
        num_bytes = prod(spec.shape) * torch_dtype(spec).itemsize
        if device != CPU and num_bytes > self._left:
            device = CPU
        if device != CPU:
            self._left -= num_bytes
        return torch.empty(spec.shape, dtype=torch_dtype(spec), device=device)

    def free(self, whole: torch.Tensor) -> None:
        """It is loaded."""
        if whole.device != CPU:
            self._left += whole.nbytes


@dataclass(eq=False, slots=True, kw_only=True)
class _Tensor:
    """One that has not been installed yet."""

    spec: TensorSpec
    pieces: dict[Start, Piece]
    """Those that have not come, by where they begin."""
    come: list[Piece] = field(default_factory=list)
    is_whole: bool = False
    """Its loader takes no pieces."""
    joined: torch.Tensor | None = None
    """Those that have come, if it is loaded whole."""


class Installation:
    """One push into one process."""

    def __init__(self, expected: Mapping[str, TensorSpec], needs: Collection[str], loader: Loader, manifest: Manifest, last: Installed):
        """WeightError if pieces cannot make up a tensor. `last`: of the push before."""
        self.manifest = manifest
        self.digests: dict[tuple[str, Start], str] = {}
        """Digest of every compared piece of which this process holds something."""
        self._expected, self._loader, self._last = expected, loader, last
        self._waiting = {name: _new(expected[name], manifest.pieces.get(name, ())) for name in needs}
        self._num_needed = len(self._waiting)
        self._kept: dict[str, _Tensor] = {}
        """Tensors that the loader has and has not copied."""
        self._assembly = Assembly()

    def take(self, entry: BucketEntry, data: torch.Tensor) -> None:
        """One piece, which lies in a bucket: `data`, uint8 [bytes]."""
        tensor = self._waiting.get(entry.name)
        piece = None if tensor is None else tensor.pieces.pop(entry.start, None)
        if tensor is None or piece is None:
            known = entry.name in self._expected
            reason = "arrived twice in one push, or where nobody needs it" if known else "is not a tensor of this model"
            raise WeightError(f"tensor {entry.name!r} {reason}; a trainer rank must send every piece of its share once")
        received = _received(entry, piece, tensor.spec, data)
        if not tensor.come:
            tensor.is_whole = self._loader.takes_whole(entry.name)
        tensor.come.append(piece)
        if tensor.is_whole:
            self._join(tensor, piece, received)
        else:
            self._load_piece(tensor.spec, piece, received)
        if not tensor.pieces:
            del self._waiting[entry.name]
            if tensor.joined is not None:
                self._load_whole(tensor, tensor.joined, received.device)

    def verify(self, name: str, places: Sequence[Place]) -> None:
        """A tensor that the loader had kept lies in these places now."""
        tensor = self._kept.pop(name)
        assert tensor.joined is not None, "it is kept whole"
        for piece in tensor.come:
            self._compare(tensor.spec, piece, box_of(tensor.joined, piece.start, piece.shape), places)

    def check_came(self) -> None:
        """WeightError if a tensor is not there yet."""
        if self._waiting:
            raise WeightError(
                f"version {self.manifest.version} is incomplete: {len(self._waiting)} of {self._num_needed} tensors never arrived: "
                f"{describe_absent(self._waiting, self.manifest.pieces)}. "
                "Likely cause: a trainer rank drops tensors of its share, or a bucket was lost"
            )

    def check_copied(self) -> None:
        """WeightError if the loader still keeps a tensor."""
        if self._kept:
            raise WeightError(
                f"the engine's loader did not take, or not by a plain copy, {len(self._kept)} tensors: {first_few(self._kept)}. It may not "
                "know the names, or convert what it loads; engine arguments that change the weights' format are not supported"
            )

    def _load_piece(self, spec: TensorSpec, piece: Piece, received: torch.Tensor) -> None:
        places = self._load(spec.name, piece.start, received)
        assert places is not None, "what is kept is taken whole"
        memory = received.untyped_storage().data_ptr()
        if received.nbytes and any(place.target.untyped_storage().data_ptr() == memory for place in places):
            raise WeightError(f"tensor {spec.name!r}: load kept the bucket's memory, which the next bucket overwrites; it must copy")
        self._compare(spec, piece, received, places)

    def _join(self, tensor: _Tensor, piece: Piece, received: torch.Tensor) -> None:
        if piece.shape == tensor.spec.shape:
            tensor.joined = received.clone()
            return
        if tensor.joined is None:
            tensor.joined = self._assembly.empty(tensor.spec, received.device)
        box_of(tensor.joined, piece.start, piece.shape).copy_(received)

    def _load_whole(self, tensor: _Tensor, joined: torch.Tensor, device: torch.device) -> None:
        name, tensor.joined = tensor.spec.name, joined.to(device)
        if len(tensor.come) > 1:
            self._assembly.free(joined)
        self._kept[name] = tensor
        places = self._load(name, (0,) * joined.dim(), tensor.joined)
        if places is not None:
            self.verify(name, places)

    def _load(self, name: str, start: Start, data: torch.Tensor) -> Sequence[Place] | None:
        try:
            return self._loader.load(name, start, data)
        except WeightError:
            raise  # it names the tensor, which may be another one, that was kept
        except Exception as error:  # the engine's own code: whatever it raises, this tensor is not installed
            raise WeightError(f"tensor {name!r}: the engine could not load it: {type(error).__name__}: {error}") from error

    def _compare(self, spec: TensorSpec, piece: Piece, received: torch.Tensor, places: Sequence[Place]) -> None:
        """`received`: the piece as it came. What others hold of it is theirs to compare."""
        parts = parts_of(places, piece.start, received)
        found = found_digest(parts, received, piece.digest) if parts else piece.digest
        if found != piece.digest:
            raise WeightError(explain_damage(spec, piece, self.manifest, self._last, received=tensor_digest(received), installed=found))
        if parts:
            self.digests[spec.name, piece.start] = found


def _new(spec: TensorSpec, pieces: Collection[Piece]) -> _Tensor:
    """WeightError if the pieces cannot make up the tensor."""
    if sum(prod(piece.shape) for piece in pieces) != prod(spec.shape) or not pieces:
        boxes = ", ".join(f"{list(piece.shape)} at {list(piece.start)}" for piece in pieces)
        raise WeightError(f"tensor {spec.name!r} {list(spec.shape)}: its pieces ({boxes}) do not make it up; the plan of the push is wrong")
    return _Tensor(spec=spec, pieces={piece.start: piece for piece in pieces})


def _received(entry: BucketEntry, piece: Piece, spec: TensorSpec, data: torch.Tensor) -> torch.Tensor:
    expected = prod(piece.shape) * torch_dtype(spec).itemsize
    end = entry.offset + entry.num_bytes
    if entry.num_bytes != expected or entry.shape != piece.shape or entry.offset < 0 or end > len(data):
        raise WeightError(
            f"tensor {entry.name!r}: bytes [{entry.offset}, {end}) of a bucket of {len(data)} for {spec.dtype}{list(entry.shape)}, but "
            f"{spec.dtype}{list(piece.shape)} has {expected}; sender and receiver must run the same version of moerl"
        )
    return view_as(data[entry.offset : end], TensorSpec(name=spec.name, shape=piece.shape, dtype=spec.dtype))


def found_digest(parts: Sequence[Part], received: torch.Tensor, digest: str) -> str:
    """`digest`, which the trainer's bytes have, if each of the `parts`, in which a process holds a piece or some of it, has the trainer's
    bytes too; else that of what is there instead. Each byte that is held is read once for its digest; only of a piece that is held in
    part the digest is of what came, with which the part is compared."""
    parts = [replace(part, held=_as_sent(part.held, received.dtype)) for part in parts]
    whole = [part.held for part in parts if part.held.numel() == received.numel()]
    rest = [part for part in parts if part.held.numel() < received.numel()]
    for held in whole:
        if (found := tensor_digest(held)) != digest:
            return found
    if not rest:
        return digest
    # Compared before the digest is made: what changes in the sender's memory meanwhile shows in one of the two.
    are_same = all(_same_bytes(part.held, part.sent) for part in rest)
    return tensor_digest(received) if are_same else _digest_with(rest, received)


def _same_bytes(held: torch.Tensor, sent: torch.Tensor) -> bool:
    if held.dtype != sent.dtype:
        return False
    integer = _INTEGERS[held.element_size()]
    return torch.equal(held.view(integer), sent.view(integer))


def _digest_with(parts: Sequence[Part], received: torch.Tensor) -> str:
    """Digest of what came, with what is there instead of it."""
    if parts[0].held.dtype != received.dtype:
        return tensor_digest(parts[0].held)
    piece = received.clone()
    for part in parts:
        piece[part.place].copy_(part.held)
    return tensor_digest(piece)


def _as_sent(held: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`held` in `dtype`, if it is float32 of numbers of 16 bits and has no other values: both engines hold some routers in float32,
    GLM-4.5's, whatever the model's dtype is. Else as it is."""
    if held.dtype is not torch.float32 or dtype not in (torch.bfloat16, torch.float16):
        return held
    narrow = held.to(dtype)
    return narrow if narrow.float().equal(held) else held
