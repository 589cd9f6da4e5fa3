"""Tensors of checkpoints that hold all experts of a layer: one expert's part of STACK is called STACK[3] in rules and among names of parts.

The leading axis of a stack counts the experts.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from moerl.models.families.parts.family import Family

if TYPE_CHECKING:
    from torch import Tensor

_PART = re.compile(r"(.+)\[(\d+)\]")


def stack_of(name: str) -> tuple[str, int] | None:
    """The stack and the place in it, if `name` is that of a part."""
    match = _PART.fullmatch(name) if name.endswith("]") else None
    return None if match is None else (match[1], int(match[2]))


def stored_name(name: str) -> str:
    """Name of the checkpoint's tensor that `name` is, or is a part of."""
    found = stack_of(name)
    return name if found is None else found[0]


def stored_names(names: Iterable[str]) -> list[str]:
    """Each once, in the order in which they first come."""
    return list(dict.fromkeys(stored_name(name) for name in names))


def stack_templates(family: Family) -> list[str]:
    """Names of the family's stacks, with {layer}."""
    return [name.removesuffix("[{expert}]") for rule in family.rules for name in rule.hf if name.endswith("[{expert}]")]


def restack(tensors: "Iterable[tuple[str, Tensor]]", num_parts: Mapping[str, int]) -> "Iterator[tuple[str, Tensor]]":
    """The same with every stack whole, as soon as its last part came; `num_parts`: of each stack. Parts of a stack follow each other."""
    whole: dict[str, tuple[Tensor, int]] = {}
    for name, tensor in tensors:
        part = stack_of(name)
        if part is None:
            yield name, tensor
            continue
        stack, place = part
        held, found = whole.pop(stack) if stack in whole else (tensor.new_empty(num_parts[stack], *tensor.shape), 0)
        held[place] = tensor
        if found + 1 < num_parts[stack]:
            whole[stack] = held, found + 1
        else:
            yield stack, held
    assert not whole, f"parts are missing of {', '.join(whole)}"
