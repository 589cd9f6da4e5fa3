"""The parameters of a sharded checkpoint and their Hugging Face tensors, from a family's rules alone: no model is built.

Stored keys are Megatron's names, except that the experts of a layer are one tensor with a leading axis (Megatron-Core 0.16 and 0.19,
transformer/moe/experts.py, sharded_state_dict). In what others train, layers that are all alike may be one tensor as well, with an axis
before that of experts and no number in its key (transformer/transformer_block.py, non_homogeneous_layers).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from moerl.models.families.parts.config_fields import broken_fields
from moerl.models.families.parts.family import Family, Rule, pattern_of
from moerl.models.find_family import explain_unknown, find_family, has_family
from moerl.models.shards import DeltaSizes, Sizes
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
        family.rotary(_unquantized(config))
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
    described = fields_of(family, config)
    heads = described["num_attention_heads"]
    return Sizes(
        num_layers=described["num_layers"],
        num_query_groups=described.get("num_query_groups", heads),
        head_dim=described.get("kv_channels", described["hidden_size"] // heads),
        vocab_size=config["vocab_size"],
        padded_vocab_size=config["vocab_size"],
        delta=DeltaSizes.of(described),
    )


def fields_of(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of config.json in the words of Megatron's configuration."""
    return family.transformer_config(_unquantized(config))


def num_experts(family: Family, config: Mapping[str, Any]) -> int:
    """0 for a dense model."""
    return fields_of(family, config).get("num_moe_experts", 0)


def _unquantized(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != "quantization_config"}


def parameters_of_names(family: Family, names: Iterable[str], *, num_layers: int) -> list[Parameter]:
    """Every parameter of which a Hugging Face tensor is among `names`, in the order of `names`."""
    candidates: dict[str, tuple[Rule, dict[str, int]]] = {}
    patterns = [(rule, pattern_of(template)) for rule in family.rules for template in rule.hf]
    for name in names:
        for rule, pattern in patterns:
            match = pattern.fullmatch(name)
            if match:
                numbers = _counted({key: int(value) for key, value in match.groupdict().items()}, num_layers)
                if numbers is not None:
                    candidates[rule.megatron.format(**numbers)] = (rule, numbers)
    return [
        _parameter(megatron, rule, numbers, num_layers)
        for megatron, (rule, numbers) in candidates.items()
        if _applies(megatron, candidates)
    ]


def _applies(megatron: str, candidates: Mapping[str, Any]) -> bool:
    """Megatron fuses a norm into the matrix that follows, where one does; so one Hugging Face norm has two rules."""
    if megatron.endswith(".layer_norm_weight"):
        return megatron.removesuffix("layer_norm_weight") + "weight" in candidates
    if megatron.endswith(".pre_mlp_layernorm.weight"):
        return megatron.removesuffix("pre_mlp_layernorm.weight") + "mlp.linear_fc1.weight" not in candidates
    return True


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


def _parameter(megatron: str, rule: Rule, numbers: dict[str, int], num_layers: int) -> Parameter:
    expert = numbers.get("expert")
    key = megatron
    if expert is not None:
        key = megatron.removesuffix(str(expert)).replace(".mlp.experts.", ".mlp.experts.experts.")
    return Parameter(key=key, place=() if expert is None else (expert,), rule=rule, hf=rule.hf_names(numbers, num_layers))


def _counted(numbers: dict[str, int], num_layers: int) -> dict[str, int] | None:
    """With layers of multi-token prediction counted from 0; None if the number is of the other kind of layer."""
    if "mtp" in numbers:
        return {**numbers, "mtp": numbers["mtp"] - num_layers} if numbers["mtp"] >= num_layers else None
    return numbers if numbers.get("layer", 0) < num_layers else None
