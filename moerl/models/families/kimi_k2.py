"""Kimi-K2 (1T): DeepSeek-V3's architecture in other sizes, without groups of experts and without multi-token prediction.

transformers has no class of this model_type; published checkpoints bring DeepSeek-V3's as their own code.
"""

from dataclasses import replace

from moerl.models.families.deepseek_v3 import DEEPSEEK_V3
from moerl.models.families.parts.family import Served

KIMI_K2 = replace(DEEPSEEK_V3, served=Served(computed_as="deepseek_v3"))
