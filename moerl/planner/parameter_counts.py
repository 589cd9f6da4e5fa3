"""Parameters of a training rank, counted from config.json and layout alone: shapes of Megatron's modules, without torch.

Every rank of a pipeline stage holds as many. Shapes are those of megatron/core/models/gpt (GPTModel on Transformer Engine's specs);
tests hold them against modules that Megatron builds.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moerl.config.derive.pipeline import layer_ranges
from moerl.config.schema.layout import Layout
from moerl.config.schema.train_config import TrainConfig
from moerl.models.families.parts.config_fields import is_tied, num_mtp_layers
from moerl.models.find_family import find_family

_START, _END = 64, 128
"""Elements at whose multiples a parameter, and the end of a buffer, lie (megatron/core/distributed/param_and_grad_buffer.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkParameters:
    """Elements of each parameter of a model chunk, and over how many ranks the optimizer cuts them."""

    dense: tuple[int, ...]
    experts: tuple[int, ...]
    """Those whose gradients are summed over expert-data-parallel ranks alone."""
    frozen: tuple[int, ...]
    """Those that are not trained, and lie in no buffer."""
    shared: int | None
    """Elements of the embedding, one of `dense`, that two pipeline stages hold: it lies in a bucket of its own."""
    by_adam: int
    """Elements of `dense` that Adam updates where Muon has the matrices: embedding, output layer, norms and biases."""
    largest_matrix: int
    """Elements of the largest other one, before tensor parallelism cuts it."""
    dense_shards: int
    expert_shards: int
    layers: Mapping[int, int]
    """Elements of each layer, by its number in the model; layers of multi-token prediction follow its last one."""

    @property
    def count(self) -> int:
        return sum(self.dense) + sum(self.experts) + sum(self.frozen)

    @property
    def buffer(self) -> int:
        """Elements of the buffers that parameters, and as many gradients, lie in."""
        return sum(elements for elements, _ in self._buckets())

    @property
    def shard(self) -> int:
        """Elements of the optimizer's part of a rank."""
        return sum(elements // shards for elements, shards in self._buckets())

    @property
    def shard_by_adam(self) -> int:
        """Elements of `by_adam` in the optimizer's part of a rank: on average."""
        return self.by_adam // self.dense_shards

    def pinned_shard(self, width: int) -> float:
        """Bytes of page-locked copies of the optimizer's part, parameter by parameter: PyTorch rounds each up to a power of two
        (aten/src/ATen/core/CachingHostAllocator.h). Over ranks on average, where a parameter is cut."""
        parts = ((self.dense, self.dense_shards), (self.experts, self.expert_shards))
        return sum((1 << (size * width - 1).bit_length()) / shards for sizes, shards in parts for size in sizes)

    def _buckets(self) -> Iterator[tuple[int, int]]:
        rest = list(self.dense)
        if self.shared is not None:
            rest.remove(self.shared)
            yield _padded([self.shared], self.dense_shards), self.dense_shards
        yield _padded(rest, self.dense_shards), self.dense_shards
        yield _padded(self.experts, self.expert_shards), self.expert_shards


def _padded(sizes: "tuple[int, ...] | list[int]", shards: int) -> int:
    multiple = math.lcm(_END, shards)
    return -(-sum(-(-size // _START) * _START for size in sizes) // multiple) * multiple


def rank_parameters(hf: Mapping[str, Any], train: TrainConfig) -> list[list[ChunkParameters]]:
    """Parameters of [stage][chunk], for a layout without problems. KeyError for what config.json lacks."""
    layout, fields = train.layout, find_family(hf).transformer_config(hf)
    has_mtp, places = train.mtp_loss > 0 and num_mtp_layers(hf) > 0, layer_ranges(layout, fields["num_layers"])
    found: list[list[ChunkParameters]] = [[] for _ in places]
    for stage, ranges in enumerate(places):
        for chunk, layers in enumerate(ranges):
            is_first, is_last = stage == chunk == 0, (stage, chunk) == (layout.pp - 1, layout.vpp - 1)
            parts = {each: _layer(fields, layout, each) for each in layers}
            if is_last and has_mtp:
                parts |= {fields["num_layers"] + depth: _mtp_layer(fields, layout) for depth in range(num_mtp_layers(hf))}
            ends, shared = _ends(hf, fields, layout, is_first=is_first, is_last=is_last, has_mtp=has_mtp)
            dense = [*ends, *(size for sizes, _ in parts.values() for size in sizes)]
            experts = [size for _, sizes in parts.values() for size in sizes]
            if layout.ep == 1 and layout.etp == layout.tp:  # Megatron treats experts as it treats the rest
                dense, experts = [*dense, *experts], []
            found[stage].append(
                ChunkParameters(
                    dense=tuple(dense), experts=tuple(experts), frozen=tuple(_indexer(fields) * len(parts)),
                    by_adam=sum(ends) + _vectors(parts.values(), fields), largest_matrix=_largest(parts.values(), layout),
                    shared=shared, dense_shards=layout.dp * layout.cp,
                    expert_shards=layout.edp,
                    layers={each: sum(dense_sizes) + sum(expert_sizes) for each, (dense_sizes, expert_sizes) in parts.items()},
                )
            )  # fmt: skip
    return found


def _vectors(layers: Iterable[tuple[list[int], list[int]]], fields: Mapping[str, Any]) -> int:
    """Elements of norms and biases: what has less than 16 rows of the hidden size, as no matrix of a large model has."""
    return sum(size for dense, _ in layers for size in dense if size < 16 * fields["hidden_size"])


def _largest(layers: Iterable[tuple[list[int], list[int]]], layout: Layout) -> int:
    return max((size for dense, routed in layers for size in (max(dense) * layout.tp, max(routed, default=0) * layout.etp)), default=0)


def model_parameters(hf: Mapping[str, Any]) -> tuple[int, int]:
    """Parameters of the whole model without multi-token prediction: those that every expert-parallel rank has, and experts."""
    return server_parameters(hf, tp=1, dense_tp=1, shared_tp=1, drafts=False)


def server_parameters(hf: Mapping[str, Any], *, tp: int, dense_tp: int, shared_tp: int, drafts: bool) -> tuple[int, int]:
    """Parameters beside experts that each GPU of a server holds, and all experts. `tp`: GPUs over which attention, embedding and output
    layer are cut; `dense_tp`, `shared_tp`: those of dense layers' MLPs, and of experts that every token goes to. Norms, routers and the
    down-projections of latent attention are on every GPU. `drafts`: with a layer of multi-token prediction."""
    fields = find_family(hf).transformer_config(hf)
    layouts = {size: Layout(ranks=size, tp=size) for size in {tp, dense_tp, shared_tp}}
    ends, _ = _ends(hf, fields, layouts[tp], is_first=True, is_last=True, has_mtp=False)
    others, experts = sum(ends), 0
    numbers = [*range(fields["num_layers"]), *([fields["num_layers"] - 1] if drafts else [])]
    for layer in numbers:
        of_mlp = layouts[shared_tp if is_sparse_layer(fields, layer) else dense_tp]
        with_mlp, routed = _layer(fields, of_mlp, layer)
        attention, as_mlp = (sum(attention_parameters(fields, layout, layer)) for layout in (layouts[tp], of_mlp))
        others += sum(_indexer(fields)) + sum(with_mlp) - as_mlp + attention
        experts += sum(routed)
    return others, experts


def mtp_parameters(hf: Mapping[str, Any]) -> int:
    """Parameters of the model's layers of multi-token prediction."""
    fields = find_family(hf).transformer_config(hf)
    return num_mtp_layers(hf) * sum(sum(sizes) for sizes in (*_mtp_layer(fields, Layout()), _indexer(fields)))


def _ends(
    hf: Mapping[str, Any], fields: Mapping[str, Any], layout: Layout, *, is_first: bool, is_last: bool, has_mtp: bool
) -> tuple[list[int], int | None]:
    """Embedding, output layer and last norm of a chunk; the embedding if another stage has it too."""
    hidden, rows = fields["hidden_size"], -(-hf["vocab_size"] // layout.tp)
    table, tied = rows * hidden, is_tied(hf)
    sizes = [table] if is_first or (is_last and has_mtp) else []
    if is_last:
        sizes += [hidden] + ([] if tied and is_first else [table])
    return sizes, table if layout.pp > 1 and (is_first or is_last) and (tied or has_mtp) else None


def _layer(fields: Mapping[str, Any], layout: Layout, layer: int) -> tuple[list[int], list[int]]:
    """Elements of each parameter of a decoder layer: of what every data-parallel rank holds, and of this rank's experts."""
    attention = attention_parameters(fields, layout, layer)
    if not is_sparse_layer(fields, layer):
        return [*attention, fields["hidden_size"], *_mlp(fields, fields["ffn_hidden_size"], layout.tp)], []
    dense, experts = _experts(fields, layout)
    return [*attention, *dense], experts


def is_sparse_layer(fields: Mapping[str, Any], layer: int) -> bool:
    """Whether it has experts."""
    frequency = fields.get("moe_layer_freq", 1)
    return fields.get("num_moe_experts") is not None and (not isinstance(frequency, list) or frequency[layer] == 1)


def is_delta_net(fields: Mapping[str, Any], layer: int) -> bool:
    """Whether it has a gated delta net in the place of attention."""
    return "linear_attention_freq" in fields and fields["linear_attention_freq"][layer] == 1


def attention_parameters(fields: Mapping[str, Any], layout: Layout, layer: int) -> list[int]:
    if is_delta_net(fields, layer):
        return _delta_net(fields, layout)
    return _latent_attention(fields, layout) if fields.get("multi_latent_attention") else _attention(fields, layout)


def _mtp_layer(fields: Mapping[str, Any], layout: Layout) -> tuple[list[int], list[int]]:
    """A layer like the last one, three norms, and the projection of two hidden states to one."""
    hidden = fields["hidden_size"]
    dense, experts = _layer(fields, layout, fields["num_layers"] - 1)
    return [hidden, hidden, hidden, 2 * hidden * hidden // layout.tp, *dense], experts


def _attention(fields: Mapping[str, Any], layout: Layout) -> list[int]:
    hidden, heads, groups, channels = (fields[name] for name in ("hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"))
    gates = heads if fields.get("attention_output_gate") else 0
    rows, has_bias = (heads + gates + 2 * groups) * channels // layout.tp, fields["add_bias_linear"]
    sizes = [hidden, rows * hidden, hidden * heads * channels // layout.tp]
    sizes += [rows] if has_bias or fields.get("add_qkv_bias") else []
    if fields.get("qk_layernorm"):
        sizes += [heads * channels, groups * channels] if fields.get("qk_norm_over_heads") else [channels, channels]
    sizes += [hidden] if has_bias else []
    return sizes + ([heads // layout.tp] if fields.get("softmax_type") == "learnable" else [])


def _latent_attention(fields: Mapping[str, Any], layout: Layout) -> list[int]:
    hidden, heads, rank, latent = (fields[name] for name in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank"))
    plain, rotary, value = (fields[name] for name in ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"))
    query_rows = heads * (plain + rotary) // layout.tp
    queries = [query_rows * hidden] if rank is None else [rank * hidden, rank, query_rows * rank]
    keys = [(latent + rotary) * hidden, latent, heads * (plain + value) // layout.tp * latent]
    return [hidden, *queries, *keys, hidden * heads * value // layout.tp]


def _delta_net(fields: Mapping[str, Any], layout: Layout) -> list[int]:
    """Norm, projections in and out, convolution, biases and decays of heads, norm of the output. `layout`: of a server, which cuts all
    but norms; in training tensor parallelism is 1."""
    hidden, keys, values = fields["hidden_size"], fields["linear_num_key_heads"], fields["linear_num_value_heads"]
    key, value = keys * fields["linear_key_head_dim"], values * fields["linear_value_head_dim"]
    cut = [
        (2 * key + 2 * value + 2 * values) * hidden,
        (2 * key + value) * fields["linear_conv_kernel_dim"],
        values,
        values,
        hidden * value,
    ]
    return [hidden, fields["linear_value_head_dim"], *(size // layout.tp for size in cut)]


def _indexer(fields: Mapping[str, Any]) -> list[int]:
    """Tensors of a layer's sparse attention, if it has one; whole on every rank."""
    if fields.get("experimental_attention_variant") != "dsa":
        return []
    heads, channels, hidden = (fields[name] for name in ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "hidden_size"))
    return [heads * channels * fields["q_lora_rank"], channels * hidden, channels, channels, heads * hidden]


def _mlp(fields: Mapping[str, Any], ffn: int, ranks: int) -> list[int]:
    hidden = fields["hidden_size"]
    weights = [2 * ffn // ranks * hidden, hidden * (ffn // ranks)]
    return weights + ([2 * ffn // ranks, hidden] if fields["add_bias_linear"] else [])


def _experts(fields: Mapping[str, Any], layout: Layout) -> tuple[list[int], list[int]]:
    """Norm, router and shared experts; the routed ones of a rank."""
    hidden, number = fields["hidden_size"], fields["num_moe_experts"]
    dense = [hidden, number * hidden, *([number] if fields["add_bias_linear"] else [])]
    if (shared := fields.get("moe_shared_expert_intermediate_size")) is not None:
        dense += [*_mlp(fields, shared, layout.tp), *([hidden] if fields.get("moe_shared_expert_gate") else [])]
    return dense, _mlp(fields, fields["moe_ffn_hidden_size"], layout.etp) * (number // layout.ep)
