"""The parameters of a sharded checkpoint and their Hugging Face tensors, from a family's rules alone: no model is built.

Stored keys are Megatron's names, except that the experts of a layer are one tensor with a leading axis (Megatron-Core 0.16 and 0.19,
transformer/moe/experts.py, sharded_state_dict). In what others train, layers that are all alike may be one tensor as well, with an axis
before that of experts and no number in its key (transformer/transformer_block.py, non_homogeneous_layers).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from moerl.models.families.parts.config_fields import broken_fields, is_tied, num_mtp_layers
from moerl.models.families.parts.family import Family, Rule
from moerl.models.find_family import explain_unknown, find_family, has_family
from moerl.models.parameter_shapes import Shape, parameter_shapes, places
from moerl.models.shards import Sizes
from moerl.types.errors import ConvertError, Problem, problem

_EXPERT_KEY = re.compile(r"(.*\.mlp\.experts\.)experts\.(.*)")
_STACKED_KEY = re.compile(r"decoder\.layers\.(?![0-9])(.*)")
_MEGATRON_019 = "mtp_model_layer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    key: str
    """In the checkpoint."""
    place: tuple[int, ...]
    """On the leading axes of that key: of layers, if they are stacked, then of experts."""
    rule: Rule
    hf: tuple[str, ...]


def family_of(config: Mapping[str, Any]) -> Family:
    """Raises ConvertError for an architecture without a family, and for a config.json that breaks its rules, with all of them."""
    family = described_family(config)
    if broken := list(family.broken_rules(_unquantized(config))):
        raise ConvertError([problem("config.json", config["model_type"], rule, reason, fix) for rule, reason, fix in broken])
    return family


def described_family(config: Mapping[str, Any]) -> Family:
    """Whether or not it breaks rules. Raises ConvertError for an architecture without a family and for a setting that is not there."""
    if not has_family(config):
        raise ConvertError([problem("config.json: model_type", config.get("model_type"), *explain_unknown(config))])
    if broken := list(broken_fields(config)):
        raise ConvertError([problem("config.json", config["model_type"], rule, reason, fix) for rule, reason, fix in broken])
    family = find_family(config)
    try:
        list(family.broken_rules(_unquantized(config)))
        sizes_of(family, config)
        family.rotary(config)
    except KeyError as error:
        reason = f"a model of type {config['model_type']} cannot be described without"
        fix = "fetch config.json again, or write what the model was trained with"
        raise ConvertError([problem(f"config.json: {error.args[0]}", None, "is missing", reason, fix)]) from error
    return family


def computes_it(family: Family, config: Mapping[str, Any]) -> bool:
    """Megatron, and what config.json says."""
    return not list(family.broken_rules(_unquantized(config)))


def sizes_of(family: Family, config: Mapping[str, Any]) -> Sizes:
    """Sizes of a model on one rank."""
    return Sizes.of(family.transformer_config(config), vocab_size=config["vocab_size"])


def num_experts(family: Family, config: Mapping[str, Any]) -> int:
    """0 for a dense model."""
    return family.transformer_config(config).get("num_moe_experts", 0)


def _unquantized(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != "quantization_config"}


def built_shapes(family: Family, config: Mapping[str, Any]) -> dict[Rule, Shape]:
    """Shapes of Megatron's parameters on one rank, without padding of the vocabulary."""
    return parameter_shapes(family, family.transformer_config(config), vocab_size=config["vocab_size"], tied=is_tied(config))


def parameters_of(family: Family, config: Mapping[str, Any]) -> Iterator[Parameter]:
    """Every parameter of the model, those of multi-token prediction too, under the key that a layer of its own has."""
    fields = family.transformer_config(config)
    for rule in built_shapes(family, config):
        key = rule.megatron.removesuffix("{expert}").replace(".mlp.experts.", ".mlp.experts.experts.")
        for numbers in places(rule, fields, num_mtp_layers(config)):
            place = (numbers["expert"],) if rule.is_expert else ()
            yield Parameter(key=key.format(**numbers), place=place, rule=rule, hf=rule.hf_names(numbers, fields["num_layers"]))


def parameters_of_keys(
    family: Family, shapes: Mapping[str, tuple[int, ...]], *, num_layers: int, num_experts: int
) -> tuple[list[Parameter], list[Problem]]:
    """Parameters of a checkpoint's keys of weights, with their shapes; a problem for each key that no rule maps, and for each stack of
    another number of layers or experts than the model has."""
    parameters, problems = [], []
    for key, shape in shapes.items():
        stacks = ([num_layers] if _STACKED_KEY.fullmatch(key) else []) + ([num_experts] if _EXPERT_KEY.fullmatch(key) else [])
        if shape[: len(stacks)] != tuple(stacks):
            rule = f"must have leading axes of {' and '.join(map(str, stacks))}"
            reason = f"found {shape}; they are those of the model's layers or experts"
            problems.append(problem("SRC", key, rule, reason, "a checkpoint of this model"))
            continue
        try:
            parameters += [_stored(family, key, place, num_layers) for place in product(*map(range, stacks))]
        except KeyError:
            reason = "no rule of its family in moerl/models maps it"
            problems.append(problem("SRC", key, "is no parameter of this model", reason, "a checkpoint of this model"))
    return parameters, problems


def _stored(family: Family, key: str, place: tuple[int, ...], num_layers: int) -> Parameter:
    """Raises KeyError if no rule maps it."""
    name, expert = key.replace(f".{_MEGATRON_019}.", ".transformer_layer."), ""
    if match := _EXPERT_KEY.fullmatch(name):
        name, expert = match[1] + match[2], str(place[-1])
    if match := _STACKED_KEY.fullmatch(name):
        name = f"decoder.layers.{place[0]}.{match[1]}"
    rule, numbers = family.find(name + expert)
    return Parameter(key=key, place=place, rule=rule, hf=rule.hf_names(numbers, num_layers))
