"""Activations of a pipeline stage at the height of an update: what micro-batches under way keep, and what one layer needs while it runs.

Kept tensors are those of `layer_activations`. Needed on top, beside what recomputation brings back, are gradients and copies that live
while a layer runs: an estimate by the largest of them, not a count.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from moerl.config.derive.pipeline import layer_ranges
from moerl.config.schema.run_config import RunConfig
from moerl.config.schema.train_config import PRODUCT_ROWS, FullRecompute, RecomputeModule, SelectiveRecompute
from moerl.models.families.parts.config_fields import num_mtp_layers
from moerl.models.find_family import find_family
from moerl.models.parameter_shapes import has_experts, layer_kind
from moerl.planner.layer_activations import WIDTHS, Kernels, Term, Tokens, end_terms, layer_terms, mtp_terms


@dataclass(frozen=True, slots=True, kw_only=True)
class StageActivations:
    """Bytes on each rank of a stage."""

    kept: int
    """Tensors of all micro-batches under way at once."""
    recomputed: int
    """Tensors that come back while a layer, or a unit of layers, is in its backward pass, of those for which the next one is most too."""
    moving: int
    """Tensors that nobody keeps, then."""
    scoring: int
    """While a layer runs without gradients."""
    logits: int
    """On the last stage, what the output layer takes and a chunk of logits with its gradient; nothing of `working` is there then."""
    scoring_logits: int

    @property
    def working(self) -> int:
        return self.recomputed + self.moving

    @property
    def update(self) -> int:
        return max(self.working, self.logits)


class StageModel:
    """A model on a layout, by stage."""

    def __init__(self, hf: Mapping[str, Any], config: RunConfig, *, imbalance: float = 1.0, kernels: Kernels | None = None):
        """`imbalance`: tokens of the busiest rank's experts over the mean. `kernels`: None: Transformer Engine's."""
        family = find_family(hf)
        self._fields: dict[str, Any] = {**family.transformer_config(hf), **family.rotary(hf)}
        self._config, self._train, self._layout = config, config.train, config.train.layout
        self._kernels = Kernels(config.train, on_gpu=config.placement.device != "cpu") if kernels is None else kernels
        self._size = micro_batch_tokens(config)
        self._tokens = Tokens.of(self._fields, self._layout, self._size, imbalance=imbalance)
        self._depths = num_mtp_layers(hf) if config.train.mtp_loss > 0 else 0
        self._rows = -(-hf["vocab_size"] // self._layout.tp)
        """Rows of the vocabulary on a rank."""
        recompute = config.train.recompute
        self._modules: tuple[RecomputeModule, ...] = recompute.modules if isinstance(recompute, SelectiveRecompute) else ()
        self._full = recompute if isinstance(recompute, FullRecompute) else None
        self._terms = cache(self._terms_of_kind)

    def stages(self) -> list[StageActivations]:
        chunks = layer_ranges(self._layout, self._fields["num_layers"])
        return [self._stage(stage, ranges) for stage, ranges in enumerate(chunks)]

    def _stage(self, stage: int, chunks: Sequence[range]) -> StageActivations:
        is_last = stage == self._layout.pp - 1
        under_way = self._under_way(stage)
        kept = sum(
            under_way[chunk] * self._kept(layers, is_last=is_last and chunk == len(chunks) - 1) for chunk, layers in enumerate(chunks)
        )
        layers = sorted(
            {self._kind(layer) for layers in chunks for layer in layers}
            | ({self._fields["num_layers"] - 1} if self._depths and is_last else set())
        )
        busiest = max(layers, key=lambda layer: self._recomputed(layer) + self._moving(layer, trains=True))
        return StageActivations(
            kept=round(kept),
            recomputed=round(self._recomputed(busiest)),
            moving=round(self._moving(busiest, trains=True)),
            scoring=round(max(self._moving(layer, trains=False) for layer in layers)),
            logits=self._logits(trains=True) if is_last else 0,
            scoring_logits=self._logits(trains=False) if is_last else 0,
        )

    def _hidden(self) -> float:
        """Hidden states between two layers."""
        return self._tokens.hidden * self._fields["hidden_size"] * self._kernels.wide

    def _kind(self, layer: int) -> int:
        """The first layer that is like it."""
        return next(each for each in range(layer + 1) if layer_kind(self._fields, each) == layer_kind(self._fields, layer))

    def _terms_of_kind(self, layer: int) -> tuple[Term, ...]:
        return tuple(layer_terms(self._fields, self._layout, layer, self._tokens, self._kernels))

    def _kept(self, layers: range, *, is_last: bool) -> float:
        """Bytes of one micro-batch in a chunk."""
        whole, inputs = list(layers), 0
        if self._full is not None and self._full.method == "uniform":
            whole, inputs = [], -(-len(layers) // self._full.num_layers)
        elif self._full is not None:
            whole, inputs = whole[self._full.num_layers :], min(self._full.num_layers, len(layers))
        kept = inputs * self._hidden() + sum(_sum(self._terms(self._kind(layer)), self._modules) for layer in whole)
        if not is_last:
            return kept + (0.0 if self._train.megatron.get("deallocate_pipeline_outputs") else self._hidden())  # its output
        for _ in range(self._depths):
            if self._full is not None and self._full.method == "uniform":
                kept += 2 * self._hidden()  # its inputs
            else:
                kept += _sum(mtp_terms(self._fields, self._layout, self._tokens, self._kernels), self._modules)
        return kept + _sum(end_terms(self._fields, self._tokens, self._kernels), self._modules)

    def _recomputed(self, layer: int) -> float:
        """Bytes of a unit of layers, or of the module that needs most."""
        terms = self._terms(self._kind(layer))
        if self._full is None:
            return max((_sum(terms, ()) - _sum(terms, (module,)) for module in self._modules), default=0.0)
        number = self._full.num_layers if self._full.method == "uniform" else 1
        return number * _sum(terms, ()) - self._hidden()  # the input, which its first norm keeps as it is, was there

    def _moving(self, layer: int, *, trains: bool) -> float:
        """The largest tensors that are alive at once within a layer and that nobody keeps: of attention, or of what follows it.

        Training: gradients of the inputs and outputs of a module, of its weights (which are added to the buffers afterwards), and in
        attention those of queries in float32. Copies of tokens for experts exist before and after they are exchanged, and sorted."""
        fields, tokens, layout = self._fields, self._tokens, self._layout
        hidden, wide = fields["hidden_size"], self._kernels.wide
        heads = fields["num_attention_heads"] / layout.tp
        key = fields["qk_head_dim"] + fields["qk_pos_emb_head_dim"] if fields.get("multi_latent_attention") else fields["kv_channels"]
        attention = tokens.sequence * heads * key * (4 * wide + (4 if trains else 0))
        is_sparse = has_experts(fields, layer)
        if is_sparse:
            ffn = fields["moe_ffn_hidden_size"] / layout.etp
            rows, weights = tokens.routed, 2 * ffn * hidden * fields["num_moe_experts"] / layout.ep
        else:
            ffn = fields["ffn_hidden_size"] / layout.tp
            rows, weights = tokens.sequence, 2 * ffn * hidden
        copies = 3 * rows * hidden if is_sparse else 2 * rows * hidden
        inner = rows * (hidden + 3 * ffn) + weights if trains else rows * (hidden + 5 * ffn)
        return max(attention, max(copies, inner) * wide) + 2 * self._hidden()

    def _logits(self, *, trains: bool) -> int:
        """States that the output layer takes, of the model and of each depth of multi-token prediction (which log-probs need not), and
        those of the labels that are asked about, here all, which are kept; backward their gradients beside them. Then a chunk of logits
        (moerl/train/loss/logprobs.py): in the model's dtype and two in float32 forward; backward one, with its gradient, and a product with
        some rows of the weight. Of each of them but the one that is at work its last chunk waits for the backward pass."""
        wide, hidden = self._kernels.wide, self._fields["hidden_size"]
        chunk_tokens = min(self._train.logprob_chunk_tokens, self._tokens.sequence)
        numbers = chunk_tokens * self._rows
        chunk, narrow = numbers * max(wide, WIDTHS["float32"]), numbers * wide if wide < WIDTHS["float32"] else 0
        masks = chunk // 2 if self._config.replays_sets else 0  # two of a byte an entry
        states = self._tokens.sequence * hidden * wide
        forward = narrow + 2 * chunk + masks
        if not trains:
            return 2 * states + forward
        # A KL beside replayed sets takes log-probs twice.
        number = 1 + self._depths + (1 if self._config.replays_sets and self._config.uses_reference else 0)
        product = min(self._rows, PRODUCT_ROWS) * max(hidden, chunk_tokens) * WIDTHS["float32"]  # on CPU one factor is widened
        factors = chunk if self._config.algorithm.entropy_bonus > 0 else 0
        backward = 2 * narrow + chunk + factors + masks + product
        waiting = 0 if self._config.replays_sets else (number - 1) * chunk
        return max(2 * number * states + forward, (number + 2) * states + backward) + waiting

    def _under_way(self, stage: int) -> Counter[int]:
        """Micro-batches of each chunk whose backward pass is to come, when the first of them begins: one forward and one backward pass
        follow in turn from there (megatron/core/pipeline_parallel/schedules.py)."""
        layout, number = self._layout, micro_batches(self._config)
        if layout.vpp == 1:
            return Counter({0: min(layout.pp - stage, number)})
        runs = min(2 * (layout.pp - stage - 1) + (layout.vpp - 1) * layout.pp + 1, layout.vpp * number)
        return Counter(run // layout.pp % layout.vpp for run in range(runs))


def _sum(terms: "Sequence[Term] | Iterator[Term]", modules: Sequence[RecomputeModule]) -> float:
    return sum(term.bytes(modules) for term in terms)


def micro_batch_tokens(config: RunConfig) -> int:
    """Tokens of a full micro-batch, or of the only one of an update that fills none."""
    return min(config.train.micro_batch_tokens, update_tokens(config))


def micro_batches(config: RunConfig) -> int:
    """Number of them in an update on the busiest data-parallel rank."""
    return -(-update_tokens(config) // config.train.micro_batch_tokens)


def update_tokens(config: RunConfig) -> int:
    """Tokens of an update on the data-parallel rank that has most samples, each of model.max_context."""
    samples = config.groups_per_step * config.group_size
    return -(-samples // (config.train.updates_per_step * config.train.layout.dp)) * config.model.max_context
