"""Parameters of a training rank, counted from config.json and layout alone, without torch: shapes of a model's, cut by its family's rules.

Every rank of a pipeline stage holds as many. Tests hold them against modules that Megatron builds.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from moerl.config.derive.pipeline import layer_ranges
from moerl.config.schema.layout import Layout
from moerl.config.schema.train_config import TrainConfig
from moerl.models.families.parts.config_fields import is_tied, num_mtp_layers
from moerl.models.families.parts.family import Rule
from moerl.models.find_family import find_family
from moerl.models.parameter_shapes import LayerKind, layer_kind, parameter_shapes

_START, _END = 64, 128
"""Elements at whose multiples a parameter, and the end of a buffer, lie (megatron/core/distributed/param_and_grad_buffer.py)."""
_CUT_BY_SERVERS = ("conv1d.weight", "dt_bias", "A_log")
"""Ends of names of a gated delta net's parameters, whose heads a server shares out; in training it is whole on every rank."""


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
    layout = train.layout
    model = _Model(hf, lambda rule: 1 if rule.shard == "replicated" else layout.etp if rule.is_expert else layout.tp, ep=layout.ep)
    num_layers, depths = model.fields["num_layers"], num_mtp_layers(hf) if train.mtp_loss > 0 else 0
    places = layer_ranges(layout, num_layers)
    found: list[list[ChunkParameters]] = [[] for _ in places]
    for stage, ranges in enumerate(places):
        for chunk, layers in enumerate(ranges):
            is_first, is_last = stage == chunk == 0, (stage, chunk) == (layout.pp - 1, layout.vpp - 1)
            numbers = [*layers, *range(num_layers, num_layers + (depths if is_last else 0))]
            parts = {each: model.layer(each) for each in numbers}
            ends, shared = _ends(hf, layout, is_first=is_first, is_last=is_last, has_mtp=depths > 0)
            dense = [*ends, *(size for part in parts.values() for size in part.dense)]
            experts = [size for part in parts.values() for size in part.experts]
            if layout.ep == 1 and layout.etp == layout.tp:  # Megatron treats experts as it treats the rest
                dense, experts = [*dense, *experts], []
            found[stage].append(
                ChunkParameters(
                    dense=tuple(dense), experts=tuple(experts), frozen=tuple(size for part in parts.values() for size in part.frozen),
                    by_adam=sum(ends) + _vectors(parts.values(), model.fields), largest_matrix=_largest(parts.values(), layout),
                    shared=shared, dense_shards=layout.dp * layout.cp, expert_shards=layout.edp,
                    layers={each: sum(part.dense) + sum(part.experts) for each, part in parts.items()},
                )
            )  # fmt: skip
    return found


class _Layer(NamedTuple):
    """Elements of each parameter of a layer on a rank."""

    dense: list[int]
    """Those that every data-parallel rank holds."""
    experts: list[int]
    frozen: list[int]
    """Those of indexers, which are not trained."""


class _Model:
    """Parameters by layer; layers of multi-token prediction follow the last one."""

    def __init__(self, hf: Mapping[str, Any], ranks: Callable[[Rule], int], *, ep: int = 1):
        """`ranks`: over which a parameter is cut. `ep`: those over which experts are spread."""
        family = find_family(hf)
        self.fields = family.transformer_config(hf)
        shapes = parameter_shapes(family, self.fields, vocab_size=hf["vocab_size"], tied=is_tied(hf))
        self._sizes = {rule: math.prod(shape) // ranks(rule) for rule, shape in shapes.items() if rule.shard != "vocab"}
        self._num_experts = self.fields.get("num_moe_experts", 0) // ep
        self._of_kind = cache(self._counted)

    def layer(self, layer: int) -> _Layer:
        return self._of_kind(layer_kind(self.fields, layer))

    def _counted(self, kind: LayerKind) -> _Layer:
        found = _Layer([], [], [])
        for rule, size in self._sizes.items():
            if not kind.has(rule) or rule.is_float32:  # a buffer
                continue
            if rule.is_expert:
                found.experts.extend([size] * self._num_experts)
            else:
                (found.frozen if ".indexer." in rule.megatron else found.dense).append(size)
        return found


def _vectors(layers: Iterable[_Layer], fields: Mapping[str, Any]) -> int:
    """Elements of norms and biases: what has less than 16 rows of the hidden size, as no matrix of a large model has."""
    return sum(size for layer in layers for size in layer.dense if size < 16 * fields["hidden_size"])


def _largest(layers: Iterable[_Layer], layout: Layout) -> int:
    return max((max(max(layer.dense) * layout.tp, max(layer.experts, default=0) * layout.etp) for layer in layers), default=0)


def model_parameters(hf: Mapping[str, Any]) -> tuple[int, int]:
    """Parameters of the whole model without multi-token prediction: those that every expert-parallel rank has, and experts."""
    return server_parameters(hf, tp=1, dense_tp=1, shared_tp=1, drafts=False)


def server_parameters(hf: Mapping[str, Any], *, tp: int, dense_tp: int, shared_tp: int, drafts: bool) -> tuple[int, int]:
    """Parameters beside experts that each GPU of a server holds, and all experts. `tp`: GPUs over which attention, embedding and output
    layer are cut; `dense_tp`, `shared_tp`: those of dense layers' MLPs, and of experts that every token goes to. Norms, routers and the
    down-projections of latent attention are on every GPU. `drafts`: with a layer of multi-token prediction."""

    def ranks(rule: Rule) -> int:
        if rule.is_expert or (rule.shard == "replicated" and not rule.megatron.endswith(_CUT_BY_SERVERS)):
            return 1
        return shared_tp if ".shared_experts." in rule.megatron else dense_tp if ".mlp." in rule.megatron else tp

    model = _Model(hf, ranks)
    ends, _ = _ends(hf, Layout(ranks=tp, tp=tp), is_first=True, is_last=True, has_mtp=False)
    last = model.fields["num_layers"] - 1
    layers = [model.layer(each) for each in (*range(last + 1), *([last] if drafts else []))]
    return sum(ends) + sum(sum(layer.dense) + sum(layer.frozen) for layer in layers), sum(sum(layer.experts) for layer in layers)


def mtp_parameters(hf: Mapping[str, Any]) -> int:
    """Parameters of the model's layers of multi-token prediction."""
    model = _Model(hf, lambda _: 1)
    layers = [model.layer(model.fields["num_layers"] + depth) for depth in range(num_mtp_layers(hf))]
    return sum(sum(sizes) for layer in layers for sizes in layer)


def _ends(hf: Mapping[str, Any], layout: Layout, *, is_first: bool, is_last: bool, has_mtp: bool) -> tuple[list[int], int | None]:
    """Embedding, output layer and last norm of a chunk; the embedding if another stage has it too."""
    hidden, rows = hf["hidden_size"], -(-hf["vocab_size"] // layout.tp)
    table, tied = rows * hidden, is_tied(hf)
    sizes = [table] if is_first or (is_last and has_mtp) else []
    if is_last:
        sizes += [hidden] + ([] if tied and is_first else [table])
    return sizes, table if layout.pp > 1 and (is_first or is_last) and (tied or has_mtp) else None
