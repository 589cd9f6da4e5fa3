"""Build this rank's part of the model: Megatron's GPTModel on its Transformer Engine specs, data-parallel wrapper.

Call only after megatron_patches.activate().
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor, nn

from moerl.config.schema.layout import Layout
from moerl.config.schema.train_config import FullRecompute, NoRecompute, Recompute, TrainConfig
from moerl.models.bridge.rank_tensors import Groups
from moerl.models.bridge.weight_bridge import WeightBridge, build_bridge
from moerl.models.families.parts.config_fields import is_tied, num_mtp_layers
from moerl.models.families.parts.family import Family
from moerl.models.find_family import find_family
from moerl.models.shards import Sizes
from moerl.train.loss.logprobs import HeadInput
from moerl.train.megatron import fp8_fields
from moerl.train.megatron.attention_variants import decoder_layers, freeze_indexers, prepare_delta_nets
from moerl.train.megatron.fusions import FusedKernels, fusions
from moerl.train.megatron.norm_over_heads import norm_over_heads
from moerl.train.megatron.overlap import data_parallel_config, reduce_after_last_micro_batch
from moerl.train.megatron.router_balance import RouterBalance
from moerl.train.megatron.router_replay import Routing
from moerl.train.megatron.value_head import ValueHead


def recompute_fields(recompute: Recompute) -> dict[str, Any]:
    """Keyword arguments of TransformerConfig, for the activations that are computed again in the backward pass."""
    if isinstance(recompute, NoRecompute):
        return {}
    if isinstance(recompute, FullRecompute):
        return {"recompute_granularity": "full", "recompute_method": recompute.method, "recompute_num_layers": recompute.num_layers}
    return {"recompute_granularity": "selective", "recompute_modules": list(recompute.modules)}


_ACTIVATIONS = {"silu": torch.nn.functional.silu, "quick_gelu": quick_gelu}
"""By the names that families give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """Model of a rank before it is wrapped for training."""

    family: Family
    config: TransformerConfig
    chunks: list[nn.Module]
    """GPTModel."""
    sizes: Sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    config: TransformerConfig
    chunks: list[nn.Module]
    """GPTModel."""
    wrapped: list[nn.Module]
    """The same in DistributedDataParallel: what runs."""
    bridge: WeightBridge
    routers: RouterBalance
    routing: Routing
    vocab_size: int
    """Rows of the logits above it are padding."""
    fusions: str
    """Which are on, and why the others are not."""
    is_critic: bool = False
    """Its output is a value for each token, not logits."""


def build_model(model_dir: Path, train: TrainConfig, *, max_context: int, is_critic: bool = False) -> Model:
    hf = json.loads((model_dir / "config.json").read_text())
    built = build_chunks(hf, train, max_context=max_context, is_critic=is_critic)
    config, chunks = built.config, built.chunks
    wrapped = [_wrap(config, train, chunk, is_first=index == 0) for index, chunk in enumerate(chunks)]
    reduce_after_last_micro_batch(config, wrapped)
    return Model(
        config=config,
        chunks=chunks,
        wrapped=wrapped,
        bridge=build_bridge(
            train.bridge,
            getattr(torch, train.dtype),
            built.family,
            chunks,
            groups=Groups(
                tensor=parallel_state.get_tensor_model_parallel_group(),
                expert_tensor=parallel_state.get_expert_tensor_parallel_group(),
                expert=parallel_state.get_expert_model_parallel_group(),
            ),
            sizes=built.sizes,
            tied=is_tied(hf) and not is_critic,
            source=model_dir,
            has_output=not is_critic,
        ),
        routers=RouterBalance(config, chunks, train.layout),
        routing=Routing(config, chunks, train.layout, replays=train.router_replay != "off"),
        vocab_size=built.sizes.vocab_size,
        fusions=config.fusions,
        is_critic=is_critic,
    )


def build_chunks(hf: Mapping[str, Any], train: TrainConfig, *, max_context: int, is_critic: bool = False) -> Built:
    """This rank's part of the model that a config.json describes, for the process groups that exist. Without weights of a checkpoint.

    Raises CheckpointError if no family fits, or naming what Megatron would compute otherwise.
    """
    family = find_family(hf)
    config = _transformer_config(family, hf, train)
    padded_vocab_size = -(-hf["vocab_size"] // train.layout.tp) * train.layout.tp
    stages = range(train.layout.vpp) if train.layout.vpp > 1 else [None]
    sizes: dict[str, Any] = {"padded_vocab_size": padded_vocab_size, "max_context": max_context, "is_critic": is_critic}
    chunks = [_chunk(config, family, hf, vp_stage, tied=is_tied(hf) and not is_critic, **sizes) for vp_stage in stages]
    for chunk in chunks:
        if is_critic and chunk.post_process:
            chunk.output_layer = ValueHead(config)
        _in_one_dtype(chunk, config.params_dtype)
        _reduce_replicated_experts(chunk, train.layout)
        _count_in_norm(chunk)
        freeze_indexers(chunk)
        prepare_delta_nets(chunk)
    described = Sizes.of(family.transformer_config(hf), vocab_size=hf["vocab_size"], padded_vocab_size=padded_vocab_size)
    return Built(family=family, config=config, chunks=chunks, sizes=described)


def _chunk(
    config: TransformerConfig, family: Family, hf: Mapping[str, Any], vp_stage: int | None, *, padded_vocab_size: int, max_context: int,
    tied: bool, is_critic: bool,
) -> GPTModel:  # fmt: skip
    layers = decoder_layers(config, vp_stage)
    if config.qk_norm_over_heads:
        norm_over_heads(layers)
    has_mtp = config.mtp_num_layers is not None
    return (GPTModel if is_critic else HeadlessModel)(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=padded_vocab_size,
        max_sequence_length=max_context,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=tied,
        mtp_block_spec=get_gpt_mtp_block_spec(config, layers, use_transformer_engine=True, vp_stage=vp_stage) if has_mtp else None,
        vp_stage=vp_stage,
        **family.rotary(hf),
    )


def _transformer_config(family: Family, hf: Mapping[str, Any], train: TrainConfig) -> TransformerConfig:
    layout, dtype = train.layout, getattr(torch, train.dtype)
    described = family.checked_config(hf)
    if dtype == torch.float64:  # Megatron casts what the router computes to its own dtype, which must not be the narrower one
        described["moe_router_dtype"] = "fp64"
    # GPTModel reads what describes YaRN outside of latent attention from attributes that TransformerConfig has no fields for.
    beside = {name: described.pop(name) for name in list(described) if name.startswith("yarn_")}
    beside["qk_norm_over_heads"] = described.pop("qk_norm_over_heads", False)
    chosen: dict[str, Any] = dict(
        activation_func=_ACTIVATIONS[described.pop("activation_func", "silu")],
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=layout.tp > 1,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        # Without overlap the interleaved schedule sends an activation and a gradient at once. At pp=2 both go to one peer, which
        # takes them for each other: silently wrong gradients. With overlap it sends them one after the other.
        overlap_p2p_comm=layout.vpp > 1,
        batch_p2p_comm=layout.vpp == 1,
        num_layers_in_first_pipeline_stage=layout.first_stage_layers,
        num_layers_in_last_pipeline_stage=layout.last_stage_layers,
        account_for_embedding_in_pipeline_split=layout.embedding_as_layer,
        account_for_loss_in_pipeline_split=layout.loss_as_layer,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        variable_seq_lengths=True,
        # allgather refuses variable lengths, for dense models too; flex is train.megatron's to choose (docs/gpu.md).
        moe_token_dispatcher_type="alltoall",
        # The loss is scaled once, in moerl/train/loss/batch_loss.py: Megatron must neither average over micro-batches nor over ranks.
        calculate_per_token_loss=True,
        mtp_num_layers=num_mtp_layers(hf) if train.mtp_loss > 0 else None,
        **fp8_fields.megatron_fields(train.fp8),
    )
    fused = fusions(FusedKernels.found(), described | beside | chosen | train.megatron)
    fused.check(train.megatron)
    chosen |= fused.settings()
    kind = MLATransformerConfig if described.get("multi_latent_attention") else TransformerConfig
    config = kind(**described | chosen | recompute_fields(train.recompute) | _asked(train.megatron))
    config.finalize_model_grads_func = sum_gradients
    beside["fusions"] = fused.words(train.megatron)
    for name, value in beside.items():
        setattr(config, name, value)
    return config


def _asked(megatron: Mapping[str, Any]) -> dict[str, Any]:
    """`train.megatron`, with the members of Megatron's enumerations that names stand for: it compares with those and nothing else, so that
    a name of attention_backend would have no effect (language_module.py, _set_attention_backend)."""
    name = megatron.get("attention_backend")
    return dict(megatron) if name is None else {**megatron, "attention_backend": AttnBackend[name]}


def sum_gradients(model: list[nn.Module], num_tokens: Any = None, **kwargs: Any) -> None:
    """Megatron would divide by `num_tokens`; the loss already is."""
    finalize_model_grads(model, None, **kwargs)


def _in_one_dtype(chunk: nn.Module, dtype: torch.dtype) -> None:
    """Transformer Engine makes the sinks of attention in float32, and only Megatron's wrapper for bfloat16 casts them.

    Chunks after the first are gathered as one group of buffers, which gloo takes for one dtype: in float64 their weights would be garbage.
    """
    for parameter in chunk.parameters():
        if parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


def _reduce_replicated_experts(chunk: nn.Module, layout: Layout) -> None:
    """Experts that tensor-parallel ranks replicate see different tokens there, so their gradients are summed over expert data parallel.

    Megatron 0.16 marks expert parameters for that only when ep > 1 (extensions/transformer_engine.py, TEGroupedLinear); with ep = 1 and
    etp < tp their gradients would silently stay partial.
    """
    if layout.ep == 1 and layout.etp != layout.tp:
        for name, parameter in chunk.named_parameters():
            if ".experts." in name:
                parameter.allreduce = False  # type: ignore[attr-defined]


def _count_in_norm(chunk: nn.Module) -> None:
    """The norm of gradients counts what is not marked as cut over tensor parallelism on the first rank alone.

    Transformer Engine cuts the sinks of attention and does not mark them. It marks the weights of experts, which ranks share out, and
    not their biases (pytorch/module/grouped_linear.py, reset_parameters).
    """
    for name, parameter in chunk.named_parameters():
        if name.endswith(".softmax_offset") or (".experts." in name and ".bias" in name):
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


def _wrap(config: TransformerConfig, train: TrainConfig, chunk: nn.Module, *, is_first: bool) -> nn.Module:
    module = Float16Module(config, chunk) if config.bf16 else chunk
    for name, buffer in chunk.named_buffers():
        # Rounded to bfloat16 by Float16Module; Megatron widens it again only in the first forward pass, after the weights were loaded.
        if name.endswith(".expert_bias"):
            buffer.data = buffer.data.float()
    # The gradients of the other chunks are complete only when those of the first are: their buckets would hide nothing.
    return DistributedDataParallel(config, data_parallel_config(train), module, disable_bucketing=not is_first)


class HeadlessModel(GPTModel):
    """Megatron's GPTModel that leaves logits and losses to whoever has the labels of a micro-batch (moerl/train/loss).

    Megatron's own forward makes whole logits, and computes the loss of multi-token prediction inside the model: it needs labels, which RL
    does not give it, and it divides by counts of one rank and one micro-batch.
    """

    def _postprocess(self, hidden_states: Tensor, input_ids: Tensor, position_ids: Tensor, **inputs: Any) -> Tensor | tuple[HeadInput, ...]:
        """On the last stage what the output layer makes logits of, and where gradients are wanted the same of each depth in order."""
        if not self.post_process:
            return hidden_states
        hidden = [hidden_states]
        if self.config.mtp_num_layers is not None and torch.is_grad_enabled():
            stacked = self.mtp(
                input_ids=input_ids,
                position_ids=position_ids,
                hidden_states=hidden_states,
                embedding=self.embedding,
                **{name: inputs[name] for name in ("attention_mask", "rotary_pos_emb", "packed_seq_params")},
            )
            hidden = list(torch.chunk(stacked, 1 + self.config.mtp_num_layers))
        for hook in list(self.output_layer._forward_pre_hooks.values()):
            hook(self.output_layer, ())  # it is not called, and so nobody else would wait for its weight to be gathered
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else self.output_layer.weight
        return tuple(self._head_input(states, weight) for states in hidden)

    def _head_input(self, states: Tensor, weight: Tensor) -> HeadInput:
        if self.config.sequence_parallel:
            states = tensor_parallel.gather_from_sequence_parallel_region(states)
        embedding = getattr(self, "embedding", None)  # of the first stage, and beside multi-token prediction
        is_embedding = embedding is not None and weight is embedding.word_embeddings.weight
        return HeadInput(hidden_TH=states.transpose(0, 1).flatten(0, 1), weight_VH=weight, is_embedding=is_embedding)
