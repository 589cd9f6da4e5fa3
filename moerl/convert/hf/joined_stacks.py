"""Stacks of experts (moerl/models/expert_stacks.py): a sharded checkpoint is made of their parts, a Hugging Face folder holds them
whole."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, groupby

from torch import Tensor

from moerl.convert.hf.hf_source import HFSource
from moerl.convert.tensors.entry import Entry
from moerl.convert.tensors.safetensors_file import StoredTensor
from moerl.models.expert_stacks import stack_templates, stored_name
from moerl.models.families.parts.family import Family
from moerl.types.errors import ConvertError, problem


def in_parts(source: HFSource, family: Family, num_experts: int) -> HFSource:
    """The same with the parts of each stack in its place. Raises ConvertError for every stack that does not hold the model's experts."""
    patterns = [re.compile(re.escape(template).replace(r"\{layer\}", r"\d+")) for template in stack_templates(family)]
    tensors: dict[str, StoredTensor] = {}
    problems = []
    for name, stored in source.tensors.items():
        if not any(pattern.fullmatch(name) for pattern in patterns):
            tensors[name] = stored
        elif stored.shape[:1] != (num_experts,):
            rule, fix = f"must hold {num_experts} experts on its first axis", "fetch the checkpoint and its config.json again"
            problems.append(problem("SRC", f"{stored.file}: {name}", rule, f"found shape {stored.shape}", fix))
        else:
            tensors |= {f"{name}[{place}]": stored.part(place) for place in range(num_experts)}
    if problems:
        raise ConvertError(problems)
    return replace(source, tensors=tensors)


def joined(entries: Sequence[Entry]) -> list[Entry]:
    """With every stack as one tensor; its parts follow each other, in order."""
    return [_joined(name, list(parts)) for name, parts in groupby(entries, key=lambda entry: stored_name(entry.name))]


def _joined(name: str, parts: list[Entry]) -> Entry:
    first = parts[0]
    if first.name == name:
        return first

    def pieces() -> Iterator[Tensor]:
        return chain.from_iterable(part.pieces() for part in parts)

    return Entry(name=name, dtype=first.dtype, shape=(len(parts), *first.shape), pieces=pieces)
