"""Whether a model holds a piece as the trainer sent it, of a process that holds all of it or a part. Each byte that it holds is read once
for its digest; only of a piece that it holds in part the digest is of what came, with which the part is compared."""

from collections.abc import Sequence

import torch

from moerl.weights.verify.digest import tensor_digest
from moerl.weights.verify.places import Part

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def found_digest(parts: Sequence[Part], received: torch.Tensor, digest: str) -> str:
    """`digest`, which the trainer's bytes have, if each of the `parts` has the trainer's bytes too; else that of what is there instead."""
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
