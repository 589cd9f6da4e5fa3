"""Is a checkpoint that of its config.json: every tensor of the model that Megatron would build, each in its shape? From headers alone."""

import re
from collections.abc import Iterable, Iterator, Sequence

from moerl.convert.hf.hf_plan import is_scale
from moerl.convert.hf.hf_source import HFSource
from moerl.convert.hf.joined_stacks import in_parts
from moerl.convert.hf.mxfp4 import is_packed
from moerl.convert.sharded.expected_tensors import ExpectedTensor, expected_tensors
from moerl.convert.sharded.parameters import Parameter, built_shapes, computes_it, described_family, num_experts, parameters_of
from moerl.convert.sharded.sharded_source import ShardedSource
from moerl.models.families.parts.config_fields import is_tied
from moerl.models.families.parts.family import Family
from moerl.models.find_family import has_family
from moerl.types.errors import Problem, problem

_STACKED = re.compile(r"^(decoder\.layers\.)[0-9]+\.")
_FETCH = "fetch the checkpoint again; its config.json must be of the same model"


def tensor_problems(source: HFSource, family: Family) -> list[Problem]:
    """Everything that is missing, unknown, of another shape, or no floating-point number. Stacks of experts are in parts.

    Nothing of weights in MXFP4, which are under other names."""
    if is_packed(source.config):
        return []
    names = [name for name in source.tensors if not is_scale(source, name)]
    expected = expected_tensors(family, source.config)
    known = [name for name in names if name in expected.shapes or name in expected.copies]
    unknown = _unknown(source, set(names) - set(known), family.left_out)
    return [*_missing(source, expected, set(names)), *_misshapen(source, expected, known), *unknown]


def copied_problems(source: HFSource) -> list[Problem]:
    """The same of a folder that becomes another one. Nothing of an architecture that moerl does not describe, or that Megatron would
    compute otherwise: it is copied as it is. Raises ConvertError for a config.json with a gap."""
    if not has_family(source.config) or is_packed(source.config):
        return []
    family = described_family(source.config)
    if not computes_it(family, source.config):
        return []
    return tensor_problems(in_parts(source, family, num_experts(family, source.config)), family)


def _missing(source: HFSource, expected: ExpectedTensor, held: set[str]) -> Iterator[Problem]:
    """Layers of multi-token prediction may be absent as a whole: a model saved by transformers has lost them."""
    num_layers = source.config["num_hidden_layers"]
    layers = {layer for name in held if (layer := _layer(name)) is not None}
    for name in sorted(expected.shapes.keys() - held):
        layer = _layer(name)
        if layer is None or layer < num_layers or layer in layers:
            yield problem("SRC", f"{source.directory}: {name}", "is missing", "no file holds it", _FETCH)


def _layer(name: str) -> int | None:
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] and re.fullmatch("[0-9]{1,9}", parts[2]) else None


def _misshapen(source: HFSource, expected: ExpectedTensor, names: Iterable[str]) -> Iterator[Problem]:
    shapes = {**expected.shapes, **expected.copies}
    for name in names:
        stored = source.tensors[name]
        if stored.shape != shapes[name]:
            rule, reason = f"must have shape {shapes[name]}", f"found {stored.shape}; config.json describes a model of other sizes"
            yield problem("SRC", f"{stored.file}: {name}", rule, reason, _FETCH)
        if not stored.dtype.is_floating_point:
            rule = "must hold floating-point numbers"
            reason = f"found {stored.dtype}; weights quantized to integers need their own method to be read"
            yield problem("SRC", f"{stored.file}: {name}", rule, reason, "the unquantized checkpoint")


def _unknown(source: HFSource, names: set[str], left_out: tuple[str, ...]) -> Iterator[Problem]:
    """Except what the family leaves out, rotary frequencies, and an output layer that is the embedding."""
    for name in sorted(names):
        if name.startswith(left_out) or name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and is_tied(source.config)):
            continue
        reason = "no parameter of its family is made of it, so that it would be lost"
        yield problem("SRC", f"{source.tensors[name].file}: {name}", "is no tensor of this model", reason, "the config.json of this model")


def stored_problems(source: ShardedSource, family: Family, parameters: Sequence[Parameter]) -> Iterator[Problem]:
    """Problems of a sharded checkpoint, whose vocabulary may be padded: keys that the model of its config.json has not, or in another
    shape."""
    shapes, names = built_shapes(family, source.config), expected_tensors(family, source.config).shapes
    weights = source.weights()
    for parameter in {each.key: each for each in parameters}.values():
        found = tuple(weights[parameter.key].size)[len(parameter.place) :]
        expected = shapes.get(parameter.rule)
        if expected is None or parameter.hf[0] not in names:
            reason = "its config.json describes a model without this parameter"
        elif found != expected and not (parameter.rule.shard == "vocab" and found[0] >= expected[0] and found[1:] == expected[1:]):
            reason = f"found {found}, the model of its config.json has {expected}"
        else:
            continue
        fix = "another checkpoint: this one's weights and config.json are of different models"
        yield problem("SRC", f"{source.directory}: {parameter.key}", "does not fit its model", reason, fix)


def absent_problems(source: ShardedSource, family: Family, parameters: Sequence[Parameter], refused: Iterable[str]) -> Iterator[Problem]:
    """Problems of parameters that the checkpoint lacks, by the key that a layer of its own would have; nothing of what `refused` keys,
    which have a problem of their own, would hold. Layers of multi-token prediction may be absent as a whole."""
    names, said = {name for each in parameters for name in each.hf}, set(refused)
    has_mtp = any(each.rule.is_mtp for each in parameters)
    wanted = parameters_of(family, source.config)
    absent = dict.fromkeys(each.key for each in wanted if each.hf[0] not in names and (has_mtp or not each.rule.is_mtp))
    for key in absent:
        if said.isdisjoint((key, _STACKED.sub(r"\1", key))):
            fix = "another checkpoint, or the config.json of the model that this one holds"
            yield problem("SRC", f"{source.directory}: {key}", "is missing", "the model of its config.json has it", fix)
