"""Settings of the model: `model`."""

from dataclasses import dataclass
from typing import Literal

from moerl.config.schema.strict import NotNegative, Positive, Size, Strict


@dataclass(frozen=True, kw_only=True)
class ScratchModel(Strict):
    """A randomly initialised model with a character tokenizer, written as a Hugging Face checkpoint when the run starts."""

    family: Literal["qwen3", "qwen3_moe", "deepseek_v3"] = "qwen3_moe"
    hidden_size: Size = 128
    num_layers: Size = 4
    num_heads: Size = 4
    num_kv_heads: Size = 2
    head_dim: Size = 32
    ffn_size: Size = 128
    """Inner size of one expert (qwen3_moe, deepseek_v3) or of the MLP (qwen3)."""
    num_experts: Size = 8
    """Without effect for qwen3."""
    experts_per_token: Size = 2
    """Without effect for qwen3. deepseek_v3: even; a token's experts come from half as many of the groups of two experts."""
    mtp_layers: NotNegative = 1
    """Layers of multi-token prediction (deepseek_v3); without effect for the others."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Strict):
    path: str | None = None
    """Directory of a Hugging Face checkpoint (config.json, tokenizer, safetensors). Exactly one of path and scratch."""
    published: str | None = None
    """Which of the models in configs/published the checkpoint is. Without a path the run can be checked, not started; with one its
    config.json must describe that model."""
    scratch: ScratchModel | None = None
    max_context: Positive
    """Prompt and response together, in tokens; at most the model's max_position_embeddings."""

    @property
    def is_only_named(self) -> bool:
        """A published model without its checkpoint: a recipe that can be checked, not started."""
        return self.path is None and self.scratch is None and self.published is not None
