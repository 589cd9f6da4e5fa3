"""Model families by the model_type of config.json: one row each."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from moerl.models.families.deepseek_v3 import DEEPSEEK_V3, KIMI_K2
from moerl.models.families.deepseek_v32 import DEEPSEEK_V32, GLM_MOE_DSA
from moerl.models.families.glm4_moe import GLM4_MOE
from moerl.models.families.gpt_oss import GPT_OSS
from moerl.models.families.llama import LLAMA
from moerl.models.families.minimax_m2 import MINIMAX_M2
from moerl.models.families.mixtral import MIXTRAL
from moerl.models.families.parts.config_fields import broken_fields
from moerl.models.families.parts.family import BrokenRule, Family
from moerl.models.families.qwen2 import QWEN2, QWEN2_MOE
from moerl.models.families.qwen3 import QWEN3, QWEN3_MOE
from moerl.models.families.qwen3_next import QWEN3_NEXT


def _of_sound_fields(family: Family) -> Family:
    """The same, whose rules look at a config.json only if each of its fields is what it must be."""

    def broken_rules(hf: Mapping[str, Any]) -> Iterator[BrokenRule]:
        broken = list(broken_fields(hf))
        yield from broken or family.broken_rules(hf)

    return replace(family, broken_rules=broken_rules)


_DECLARED: dict[str, Family] = {
    "qwen2": QWEN2,
    "qwen2_moe": QWEN2_MOE,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_next": QWEN3_NEXT,
    "llama": LLAMA,
    "mixtral": MIXTRAL,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v32": DEEPSEEK_V32,
    "kimi_k2": KIMI_K2,
    "glm4_moe": GLM4_MOE,
    "glm_moe_dsa": GLM_MOE_DSA,
    "gpt_oss": GPT_OSS,
    "minimax_m2": MINIMAX_M2,
}

FAMILIES: dict[str, Family] = {name: _of_sound_fields(family) for name, family in _DECLARED.items()}
