"""The family of a config.json: of the table, or opened by Megatron-Bridge; else why there is none, which is nearest, and which other
packages know it."""

import difflib
from collections.abc import Mapping
from typing import Any

from moerl.models.bridge_packages import explain_known
from moerl.models.families.family_table import FAMILIES
from moerl.models.families.parts.family import BrokenRule, Family
from moerl.models.opened_families import opened
from moerl.types.errors import CheckpointError

NOT_EXPRESSED: Mapping[str, str] = {
    "qwen3_5_moe": "its config.json and weights are those of a model of images too, and moerl reads and sends texts' alone",
}
"""model_type -> what Megatron cannot compute."""


def is_native(hf: Mapping[str, Any]) -> bool:
    """Whether the model_type of this config.json is one of `FAMILIES`."""
    return isinstance(hf.get("model_type"), str) and hf["model_type"] in FAMILIES


def has_family(hf: Mapping[str, Any]) -> bool:
    """Whether it has one in the table, or one that was opened."""
    return is_native(hf) or ((found := opened(hf)) is not None and found.refusal is None)


def find_family(hf: Mapping[str, Any]) -> Family:
    """Family of a config.json. Raises CheckpointError with the nearest family if there is none."""
    if is_native(hf):
        return FAMILIES[hf["model_type"]]
    found = opened(hf)
    if found is None or found.refusal is not None:
        rule, reason, fix = explain_unknown(hf)
        raise CheckpointError(f"config.json: {rule} ({reason}); {fix}")
    return found.family


def explain_unknown(hf: Mapping[str, Any]) -> BrokenRule:
    """Rule, reason and fix for a config.json that `has_family` denies."""
    kind, names = str(hf.get("model_type")), ", ".join(sorted(FAMILIES))
    rule, fix = "must be of a family moerl knows", f"a model whose model_type is one of {names}"
    if kind in NOT_EXPRESSED:
        return BrokenRule(rule, f"model_type {kind!r} is not among them: {NOT_EXPRESSED[kind]}; {explain_known(hf)}", fix)
    listed = hf.get("architectures")
    near = _nearest(kind, [each for each in listed if isinstance(each, str)] if isinstance(listed, list) else [])
    hint = "" if near is None else f"; the nearest is {near}, and docs/add-a-family.md says how to add one"
    found = opened(hf)
    said = explain_known(hf) + ("" if found is None else f"; what it declares moerl does not take: {found.refusal}")
    return BrokenRule(rule, f"moerl/models has no family for model_type {kind!r}{hint}; {said}", fix)


def _nearest(kind: str, architectures: list[str]) -> str | None:
    """Nearest family by the model_type, then by the name of the class (Qwen2ForCausalLM)."""
    for name in (kind, *(architecture.split("For")[0].lower() for architecture in architectures)):
        if close := difflib.get_close_matches(name, FAMILIES, n=1):
            return close[0]
    return None
