"""Explanation of a push that disagrees, for people: the tensor, the trainer ranks that hold it, and the likely cause.

A manifest knows the digest of every tensor, and a session those of the version before: a digest that is not the expected one often
is another tensor's, or an old one.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from moerl.types.push import Manifest, Piece, TensorSpec
from moerl.weights.plan.tensor_specs import first_few

EXPERT_BIAS = "e_score_correction_bias"


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """Tensors that a session verified in its last complete push; nothing before the first."""

    version: int | None = None
    digests: Mapping[tuple[str, tuple[int, ...]], str] = field(default_factory=dict)
    """Digest of every piece, by the tensor's name and where it begins."""


def explain_damage(spec: TensorSpec, piece: Piece, manifest: Manifest, last: Installed, *, received: str, installed: str) -> str:
    """About a piece of a tensor whose installed bytes are not the trainer's. `received`: digest of what arrived, before the engine's loader
    had it."""
    where = "" if piece.shape == spec.shape else f"{list(piece.shape)} at {list(piece.start)} of "
    return (
        f"tensor {spec.name!r} ({where}{spec.dtype}{list(spec.shape)}{_ranks(piece.ranks)}): the installed bytes have digest "
        f"{installed}, the trainer's {piece.digest}. Likely cause: {_cause(spec.name, piece, manifest, last, received, installed)}; "
        "this engine must not serve"
    )


def explain_difference(manifest: Manifest, difference: str, expected: Iterable[str]) -> str:
    """`difference`: of the tensors the model expects and those of the manifest, in words."""
    offered = {spec.name for spec in manifest.tensors}
    absent = [name for name in expected if name not in offered]
    causes = ["Trainer and engine must be built from the same model.path; if only dtypes differ, set rollout.dtype to train.dtype"]
    if absent and all(name.endswith(EXPERT_BIAS) for name in absent):
        causes = ["Likely cause: the trainer's export leaves out the biases of experts, which are buffers and no parameters"]
    if absent and (neighbour := _neighbour(absent[0], manifest.pieces)):
        causes.append(f"The nearest tensor that the trainer's ranks hold is {_named(neighbour, manifest.pieces)}")
    return (
        f"push of version {manifest.version} refused, the model's tensors are not those of the manifest: {difference}. {'. '.join(causes)}"
    )


Pieces = Mapping[str, Sequence[Piece]]


def describe_absent(names: Iterable[str], pieces: Pieces) -> str:
    """The first few names, with the ranks that hold them."""
    return first_few(_named(name, pieces) for name in names)


def _cause(name: str, piece: Piece, manifest: Manifest, last: Installed, received: str, found: str) -> str:
    by_loader = received == piece.digest
    where = "by the engine's loader" if by_loader else "on the way from the trainer's ranks to this server"
    if others := [other for other, pieces in manifest.pieces.items() if any(each.digest == found for each in pieces)]:
        is_expert = any(_without_expert(other) == _without_expert(name) for other in others)
        kind = "experts exchanged" if is_expert else "tensors exchanged"
        left = "" if by_loader else ", which a rank that leaves this tensor out of its bucket finds in the buffer"
        return f"{kind} {where}: these are the bytes of {describe_absent(others, manifest.pieces)}{left}"
    if last.digests.get((name, piece.start)) == found:
        return f"stale bytes: they are those of version {last.version}, so that a bucket was not filled or not read anew {where}"
    if by_loader:
        return "the engine's loader changed them (cast, transposed, wrong slice, flipped bits)"
    return f"bytes damaged {where}: bits flipped, a buffer overwritten while it was read, or a tensor left out of its bucket"


def _ranks(ranks: Sequence[int]) -> str:
    return f", trainer rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else ""


def _named(name: str, pieces: Pieces) -> str:
    return name + _ranks(sorted({rank for piece in pieces.get(name, ()) for rank in piece.ranks}))


def _neighbour(name: str, pieces: Pieces) -> str | None:
    """The name that has most in common with `name` from its start."""
    parts = name.split(".")

    def num_common(other: str) -> int:
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(parts, other.split("."), strict=False)))

    return max(pieces, key=num_common, default=None)


def _without_expert(name: str) -> str:
    """The same for all experts of a layer; other names as they are."""
    return re.sub(r"\.experts\.\d+\.", ".experts.*.", name)
