"""Model families: one declarative file each, and this table by the model_type of config.json. Imports neither torch nor Megatron."""

from moerl.models.deepseek_v3 import DEEPSEEK_V3
from moerl.models.family import Family
from moerl.models.glm4_moe import GLM4_MOE
from moerl.models.gpt_oss import GPT_OSS
from moerl.models.kimi_k2 import KIMI_K2
from moerl.models.llama import LLAMA
from moerl.models.mixtral import MIXTRAL
from moerl.models.qwen2 import QWEN2, QWEN2_MOE
from moerl.models.qwen3 import QWEN3, QWEN3_MOE

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
