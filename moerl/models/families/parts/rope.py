"""Rotary embeddings as config.json describes them, in the words of Megatron, and which of them Megatron computes.

transformers 5 moved rope_theta and the settings of rope_scaling into rope_parameters, and renamed "type" to "rope_type". Where a file has
both, it takes rope_scaling alone; an original_max_position_embeddings beside them goes before that within
(modeling_rope_utils.py, RotaryEmbeddingConfigMixin).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from moerl.models.families.parts.family import BrokenRule

_LLAMA3 = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
"""Written into Megatron's source (models/common/embeddings/rotary_pos_embedding.py, _apply_scaling)."""

_OF_A_LENGTH = ("llama3", "yarn", "longrope")
"""Kinds of scaling that know the length of pre-training."""


def rope_parameters(hf: Mapping[str, Any]) -> dict[str, Any]:
    """rope_type, rope_theta and the settings of the scaling."""
    given = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    named = {"rope_type": given.get("type", "default"), **given}
    if named["rope_type"] in _OF_A_LENGTH and hf.get("original_max_position_embeddings") is not None:
        named["original_max_position_embeddings"] = hf["original_max_position_embeddings"]
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


def whole_heads(hf: Mapping[str, Any]) -> Iterator[BrokenRule]:
    """Rule of families whose attention in transformers knows no partial_rotary_factor."""
    if (share := rotary_share(hf)) != 1:
        reason = "transformers turns all channels of this family's heads, whatever this says"
        yield BrokenRule(f"must not have partial_rotary_factor={share} in config.json", reason, "config.json without it, or another model")


def rope_rules(hf: Mapping[str, Any], *, kinds: tuple[str, ...] = ("default",), turns_part: bool = False) -> Iterator[BrokenRule]:
    """`kinds`: the rope_types of the family that Megatron computes. `turns_part`: partial_rotary_factor is one of its settings."""
    if not turns_part:
        yield from whole_heads(hf)
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
