"""Layers whose attention Megatron calls experimental: the indexers of DeepSeek-V3.2, the gated delta nets of Qwen3-Next.

An indexer chooses what each query attends to. It is not trained: which positions are the best has no gradient, and the loss that
pre-training gave it, the distance of its scores from those of attention, would be another objective beside the algorithm's.
"""

from functools import partial

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn


def decoder_layers(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Megatron's layers of this stage."""
    if config.experimental_attention_variant is None:
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants

    return variants.get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage=vp_stage)


def freeze_indexers(chunk: nn.Module) -> None:
    """Without a gradient they would still decay, and buckets of gradients would wait for them."""
    for name, parameter in chunk.named_parameters():
        if ".indexer." in name:
            parameter.requires_grad_(False)


def prepare_delta_nets(chunk: nn.Module) -> None:
    """The norm of what one puts out has its weights around 1, in a model whose other norms have theirs around 0. In checkpoints its
    tensors are whole: Megatron would save the projection and the convolution in parts, for a tensor parallelism that there is not."""
    for name, module in chunk.named_modules():
        if name.endswith(".self_attention") and hasattr(module, "out_norm"):
            module.out_norm.zero_centered_gamma = False
            module.sharded_state_dict = partial(MegatronModule.sharded_state_dict, module)
