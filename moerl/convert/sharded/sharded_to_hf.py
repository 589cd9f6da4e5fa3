"""Plan of a Hugging Face folder that is made of a sharded checkpoint: which tensors of the checkpoint each of its tensors is made of."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from moerl.convert.hf import hf_plan
from moerl.convert.hf.hf_source import SINGLE, HFSource
from moerl.convert.hf.joined_stacks import joined
from moerl.convert.sharded.completeness import absent_problems, stored_problems
from moerl.convert.sharded.expected_tensors import expected_tensors
from moerl.convert.sharded.parameters import Parameter, family_of, num_experts, parameters_of_keys, sizes_of
from moerl.convert.sharded.sharded_source import ShardedSource
from moerl.convert.tensors.entry import Entry, computed
from moerl.models.families.parts.config_fields import is_tied, num_mtp_layers
from moerl.models.hf_checkpoint import INDEX
from moerl.models.shards import Sizes, merge
from moerl.types.errors import ConvertError, Problem, problem

_OUTPUT, _EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"


def entries_of(source: ShardedSource, origin: Path | None, dtype: torch.dtype | None, *, without_untrained: bool = False) -> list[Entry]:
    """`origin`: the folder the run started from, for layers of multi-token prediction that were not trained. Raises ConvertError.

    `dtype` None: as stored. `without_untrained`: leave those layers out.
    """
    family = family_of(source.config)
    sizes = sizes_of(family, source.config)
    weights = source.weights()
    shapes = {key: tuple(held.size) for key, held in weights.items()}
    counts = {"num_layers": sizes.num_layers, "num_experts": num_experts(family, source.config)}
    parameters, problems = parameters_of_keys(family, shapes, **counts)
    if is_tied(source.config) and shapes.get(_OUTPUT) == shapes.get(_EMBEDDING):  # else it is a critic's head
        parameters = [each for each in parameters if each.key != _OUTPUT]
    refused = [str(each.value) for each in problems]
    problems += [*stored_problems(source, family, parameters), *absent_problems(source, family, parameters, refused)]
    if problems:
        raise ConvertError(problems)
    entries = joined([entry for each in parameters for entry in _entries(source, each, weights[each.key], sizes, dtype)])
    if without_untrained and not any(each.rule.is_mtp for each in parameters):
        return entries
    layers = range(sizes.num_layers, sizes.num_layers + num_mtp_layers(source.config))
    return entries + _mtp_entries(source, parameters, entries, origin, layers, dtype)


def stored_dtype(source: ShardedSource) -> torch.dtype:
    """The dtype of the embedding, and of all weights but those that routers need in float32."""
    return source.weights()[_EMBEDDING].properties.dtype


def _entries(
    source: ShardedSource, parameter: Parameter, held: TensorStorageMetadata, sizes: Sizes, dtype: torch.dtype | None
) -> Iterator[Entry]:
    chosen = torch.float32 if parameter.rule.is_float32 else held.properties.dtype if dtype is None else dtype
    shape = tuple(held.size)[len(parameter.place) :]
    merged = merge(parameter.rule, [torch.empty(shape, device="meta")], sizes=sizes)
    shared = _Shared(lambda: merge(parameter.rule, [source.read(parameter.key, parameter.place)], sizes=sizes))
    for index, (name, tensor) in enumerate(zip(parameter.hf, merged, strict=True)):
        yield computed(name, chosen, tuple(tensor.shape), partial(shared.take, index, chosen))


class _Shared:
    """Tensors that are read together and written one after the other."""

    def __init__(self, read: Callable[[], list[Tensor]]):
        self._read, self._held, self._lock = read, dict[int, Tensor](), Lock()

    def take(self, index: int, dtype: torch.dtype) -> Tensor:
        with self._lock:
            if index not in self._held:
                self._held = dict(enumerate(self._read()))
            return self._held.pop(index).to(dtype)


def _mtp_entries(
    source: ShardedSource, parameters: list[Parameter], entries: list[Entry], origin: Path | None, layers: range, dtype: torch.dtype | None
) -> list[Entry]:
    """Copies that published checkpoints hold for these layers, and the layers themselves if the run did not train them. `dtype` None: as
    stored."""
    if not layers:
        return []
    are_trained = any(each.rule.is_mtp for each in parameters)
    if origin is None and not are_trained:
        reason = "its model has layers of multi-token prediction, which the run did not train and so did not save"
        raise ConvertError(
            [problem("--files-from", None, "is needed", reason, "the Hugging Face folder the run started from (model.path)")]
        )
    original = None if origin is None else _opened(source, origin, layers, are_trained=are_trained)
    by_name = {entry.name: entry for entry in entries}
    added = {}
    for each in parameters:
        for copy in (copy.format(mtp=layer) for copy in each.rule.copies for layer in layers):
            if original is None or copy in original.tensors:
                tensor = by_name[each.hf[0]]
                added[copy] = Entry(name=copy, dtype=tensor.dtype, shape=tensor.shape, pieces=partial(_reread, source, each, tensor))
    if original is not None:
        prefixes = tuple(f"model.layers.{layer}." for layer in layers)
        for name in original.tensors:
            if name.startswith(prefixes) and name not in by_name and name not in added and not hf_plan.is_scale(original, name):
                kept = hf_plan.without_fp8(original, name, stored_dtype(source))
                added[name] = kept if dtype is None else hf_plan.plain_entry(original, name, dtype)
    return list(added.values())


def _opened(source: ShardedSource, origin: Path, layers: range, *, are_trained: bool) -> HFSource | None:
    """The folder of `origin`; None: one without weights, of which none are needed. Raises ConvertError with everything that keeps its
    layers of multi-token prediction from being those of the model that was trained."""
    if are_trained and not any((origin / name).exists() for name in (INDEX, SINGLE)):
        return None
    try:
        original = HFSource.open(origin)
    except ConvertError as error:
        raise ConvertError([replace(each, path="--files-from") for each in error.problems]) from error
    if problems := [] if are_trained else list(_mtp_problems(source, original, layers)):
        raise ConvertError([replace(each, path="--files-from") for each in problems])
    return original


def _mtp_problems(source: ShardedSource, original: HFSource, layers: range) -> Iterator[Problem]:
    """A layer may be absent as a whole."""
    yield from hf_plan.fp8_problems(original)
    expected = expected_tensors(family_of(source.config), source.config)
    for prefix in (f"model.layers.{layer}." for layer in layers):
        is_there = any(name.startswith(prefix) for name in original.tensors)
        for name, shape in ((name, shape) for name, shape in expected.shapes.items() if is_there and name.startswith(prefix)):
            found = original.tensors[name].shape if name in original.tensors else "none"
            if found != shape:
                reason = f"found {found}; the run did not train this layer, and takes it from there"
                fix = "the Hugging Face folder the run started from (model.path)"
                yield problem("--files-from", f"{original.directory}: {name}", f"must have shape {shape}", reason, fix)


def _reread(source: ShardedSource, parameter: Parameter, like: Entry) -> Iterator[Tensor]:
    tensor = source.read(parameter.key, parameter.place)
    yield tensor[: like.shape[0]].to(like.dtype)
