"""Rotary embeddings as config.json describes them, in the words of Megatron, and which of them Megatron computes.

transformers 5 moved rope_theta and the settings of rope_scaling into rope_parameters, and renamed "type" to "rope_type".
"""

from collections.abc import Iterator, Mapping
from typing import Any

from moerl.models.families.parts.family import BrokenRule

_LLAMA3 = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
"""Written into Megatron's source (models/common/embeddings/rotary_pos_embedding.py, _apply_scaling)."""


def rope_parameters(hf: Mapping[str, Any]) -> dict[str, Any]:
    """rope_type, rope_theta and the settings of the scaling."""
    given = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    named = {"rope_type": given.get("type", "default"), **given}
    return {"rope_theta": hf["rope_theta"], **named} if "rope_theta" in hf else named


def rotary(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of GPTModel for a plain rotary embedding or that of Llama 3, over all channels of a head or the first of them."""
    rope = rope_parameters(hf)
    arguments = {"position_embedding_type": "rope", "rotary_base": rope["rope_theta"], "rotary_percent": rotary_share(hf)}
    if rope["rope_type"] == "llama3":
        return arguments | {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
    return arguments


def rotary_share(hf: Mapping[str, Any]) -> float:
    """Share of a head's channels that turns."""
    return rope_parameters(hf).get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))


def rope_rules(hf: Mapping[str, Any], *, kinds: tuple[str, ...] = ("default",)) -> Iterator[BrokenRule]:
    """`kinds`: the rope_types of the family that Megatron computes."""
    rope = rope_parameters(hf)
    kind = rope["rope_type"]
    if kind not in kinds:
        reason = "Megatron's rotary embedding for this family has no other"
        yield BrokenRule(f"needs rope_type {' or '.join(kinds)} in rope_scaling, not {kind!r}", reason, _without_scaling(hf))
    elif kind == "llama3":
        for name, value in _LLAMA3.items():
            if rope.get(name) != value:
                reason = "Megatron's llama3 scaling has this value in its source and takes no other"
                yield BrokenRule(f"needs {name}={value} in rope_scaling, not {rope.get(name)!r}", reason, "another model of this type")


def _without_scaling(hf: Mapping[str, Any]) -> str:
    original = rope_parameters(hf).get("original_max_position_embeddings")
    if original is None:
        return "a model without rope_scaling"
    return f"rope_scaling=null and max_position_embeddings={original} if the model was trained so, and contexts fit"
