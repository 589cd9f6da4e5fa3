"""Model families: one declarative file each, and this table by the model_type of config.json."""

from moerl.models.deepseek_v3 import DEEPSEEK_V3
from moerl.models.family import Family
from moerl.models.qwen3 import QWEN3, QWEN3_MOE

FAMILIES: dict[str, Family] = {"qwen3": QWEN3, "qwen3_moe": QWEN3_MOE, "deepseek_v3": DEEPSEEK_V3}
