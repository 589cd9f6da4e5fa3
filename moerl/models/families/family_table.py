"""Model families by the model_type of config.json: one row each."""

from moerl.models.families.deepseek_v3 import DEEPSEEK_V3
from moerl.models.families.family import Family
from moerl.models.families.glm4_moe import GLM4_MOE
from moerl.models.families.gpt_oss import GPT_OSS
from moerl.models.families.kimi_k2 import KIMI_K2
from moerl.models.families.llama import LLAMA
from moerl.models.families.mixtral import MIXTRAL
from moerl.models.families.qwen2 import QWEN2, QWEN2_MOE
from moerl.models.families.qwen3 import QWEN3, QWEN3_MOE

FAMILIES: dict[str, Family] = {
    "qwen2": QWEN2,
    "qwen2_moe": QWEN2_MOE,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "llama": LLAMA,
    "mixtral": MIXTRAL,
    "deepseek_v3": DEEPSEEK_V3,
    "kimi_k2": KIMI_K2,
    "glm4_moe": GLM4_MOE,
    "gpt_oss": GPT_OSS,
}
