"""Tensors that a transformer layer keeps of one micro-batch for its backward pass, in bytes, without torch.

What a module of Transformer Engine keeps is what its source hands to `save_for_backward` (2.9, transformer_engine/pytorch): `Kernels`. The
rest are PyTorch's own operations in Megatron-Core's Python (0.16.1 to 0.19.2, whichever is installed). Tests put the sizes of the CPU's
reference modules in the place of `Kernels` and hold the sums against storages that autograd really kept.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

from moerl.config.schema.layout import Layout
from moerl.config.schema.train_config import RecomputeModule, TrainConfig
from moerl.models.parameter_shapes import has_experts, is_delta_net

WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a value."""
FP8_BYTES = {"blockwise": 1 + 4 / 128, "mxfp8": 1 + 1 / 32, "tensorwise": 1.0, "delayed": 1.0}
"""Bytes of a value and its share of a scale, in one direction (pytorch/tensor/storage)."""
FP8_WEIGHT_BYTES = FP8_BYTES | {"blockwise": 1 + 4 / 128**2}
"""Bytes of a weight's value likewise; blocks of weights are square."""

Part = Literal["attention", "mlp", "experts"]


def megatron_release() -> tuple[int, int]:
    """Release of Megatron-Core as it is installed here: (0, 16)."""
    major, minor, *_ = version("megatron-core").split(".")
    return int(major), int(minor)


@dataclass(frozen=True, slots=True)
class Term:
    """Bytes that are kept, unless one of `modules` is recomputed; then `instead` is kept, and the rest comes back in its backward pass."""

    part: Part
    kept: float
    modules: frozenset[RecomputeModule] = frozenset()
    instead: float = 0.0

    def bytes(self, recomputed: Collection[RecomputeModule]) -> float:
        return self.kept if self.modules.isdisjoint(recomputed) else self.instead


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Tokens of one micro-batch on a rank."""

    sequence: int
    """In attention: those of its context-parallel slice."""
    hidden: float
    """Between tensor-parallel parts: cut over tp, by sequence parallelism."""
    routed: float
    """Copies that its experts get; those of all expert-tensor-parallel ranks."""

    @classmethod
    def of(cls, fields: Mapping[str, Any], layout: Layout, tokens: int, *, imbalance: float = 1.0) -> "Tokens":
        """`tokens`: of a micro-batch. `imbalance`: of the busiest rank's copies over the mean."""
        sequence = tokens // layout.cp
        hidden = sequence / layout.tp
        return cls(sequence=sequence, hidden=hidden, routed=hidden * fields.get("moe_router_topk", 0) * layout.etp * imbalance)


class Kernels:
    """Bytes that modules of Transformer Engine keep, by file of transformer_engine/pytorch."""

    def __init__(self, train: TrainConfig, *, on_gpu: bool = True):
        """`on_gpu`: ranks have GPUs, or may have some."""
        self.wide = WIDTHS[train.dtype]
        self._linear = self.wide if train.fp8 is None else FP8_BYTES[train.fp8.recipe]
        self._asked: Mapping[str, Any] = train.megatron
        self._on_gpu = on_gpu and not train.reference_te
        self.copies = train.fp8 is not None
        """A linear module keeps an FP8 copy of its own, where another module keeps the same values in `dtype`."""
        self._keeps_original = train.fp8 is None or train.fp8.recipe != "delayed"
        self.megatron = megatron_release()
        self.scores_sparsely = train.megatron.get("dsa_kernel_backend", "none") != "none"
        """Sparse attention by a kernel that looks at the chosen keys alone."""

    def fuses_activation(self, fields: Mapping[str, Any]) -> bool:
        """Whether Megatron's kernel is on, which keeps its input alone (megatron/core/fusions/fused_bias_swiglu.py): for SwiGLU it is by
        itself on GPUs (moerl/train/megatron/fusions.py)."""
        is_plain = fields.get("activation_func", "silu") == "silu" and fields.get("gated_linear_unit", False)
        is_changed = fields.get("activation_func_clamp_value") is not None or fields.get("glu_linear_offset", 0.0) != 0.0
        takes_bias, is_engines = fields.get("add_bias_linear", False), self._asked.get("use_te_activation_func", False)
        by_itself = self._on_gpu and is_plain and not (is_changed or takes_bias or is_engines)
        return bool(self._asked.get("bias_activation_fusion", by_itself))

    def norm(self, part: Part, rows: float, width: int, modules: frozenset[RecomputeModule] = frozenset()) -> Term:
        """Input, which is kept for a recomputation too, and a float32 a row (module/layernorm_linear.py, ops/basic/rmsnorm.py)."""
        kept = rows * width * self.wide
        return Term(part, kept + rows * 4, modules, kept)

    def linear(self, local: float, gathered: float, *, is_shared: bool = False) -> float:
        """Input of a linear module (module/linear.py, grouped_linear.py): of sequence parallelism the own part, which the backward pass
        gathers again. `is_shared`: somebody keeps it anyway."""
        del gathered
        return 0.0 if is_shared and not self.copies else local * self._linear

    def rotary(self, fields: Mapping[str, Any], tokens: Tokens, channels: int) -> float:
        """Cosines and sines, for queries and for keys, as they are without a kernel (models/common/embeddings/rope_utils.py)."""
        del fields
        return 4 * tokens.sequence * channels * self.wide

    def attention(
        self, tokens: Tokens, heads: float, groups: float, key: int, value: int, up: frozenset[RecomputeModule], *, padding: int = 0
    ) -> Iterator[Term]:
        """Queries, keys, values, and the log of each softmax's sum (attention/dot_product_attention/backends.py). `heads`, `groups` of
        keys and values: of this rank; `key`, `value`: channels of one. `up`: modules that make the first three again. `padding`: channels
        of zeros at the end of each value, which the output has too until they are cut off."""
        yield Term("attention", tokens.sequence * (heads * key + groups * (key + value)) * self.wide, up)
        padded = tokens.sequence * ((heads + groups) * padding + (heads * value if padding else 0)) * self.wide
        yield Term("attention", tokens.sequence * heads * 4 + padded, frozenset({"core_attn"}))

    def attention_output(self, size: float) -> float:
        """Output of attention, which is the input of the projection after it (save_original_input)."""
        return size * self.wide + (0.0 if self._keeps_original else size * self._linear)


def layer_terms(fields: Mapping[str, Any], layout: Layout, layer: int, tokens: Tokens, kernels: Kernels) -> Iterator[Term]:
    """Terms of decoder layer `layer`; `fields`: of Megatron's TransformerConfig."""
    yield from _attention_of(fields, layer)(fields, layout, tokens, kernels)
    if has_experts(fields, layer):
        yield from _experts(fields, layout, tokens, kernels)
        return
    hidden = fields["hidden_size"]
    yield kernels.norm("mlp", tokens.hidden, hidden, frozenset({"mlp"}))
    ffn = fields["ffn_hidden_size"] // layout.tp
    first_input = kernels.linear(tokens.hidden * hidden, tokens.sequence * hidden)
    yield Term("mlp", first_input + _gated(fields, tokens.sequence * ffn, kernels), frozenset({"mlp"}))


def _attention_of(fields: Mapping[str, Any], layer: int) -> Callable[[Mapping[str, Any], Layout, Tokens, Kernels], Iterator[Term]]:
    if is_delta_net(fields, layer):
        return _delta_net
    if fields.get("experimental_attention_variant") == "dsa":
        return _sparse_attention
    return _latent_attention if fields.get("multi_latent_attention") else _attention


def end_terms(fields: Mapping[str, Any], tokens: Tokens, kernels: Kernels) -> Iterator[Term]:
    """Last norm. What it gives to the output layer is counted with the logits (stage_activations.py)."""
    yield kernels.norm("mlp", tokens.hidden, fields["hidden_size"])


def mtp_terms(fields: Mapping[str, Any], layout: Layout, tokens: Tokens, kernels: Kernels) -> Iterator[Term]:
    """A layer of multi-token prediction (transformer/multi_token_prediction.py): two norms, a projection of both, a layer like the last."""
    hidden = fields["hidden_size"]
    for _ in range(2):
        yield kernels.norm("mlp", tokens.hidden, hidden)
    yield Term("mlp", kernels.linear(2 * tokens.hidden * hidden, 2 * tokens.sequence * hidden))
    yield from layer_terms(fields, layout, fields["num_layers"] - 1, tokens, kernels)
    yield from end_terms(fields, tokens, kernels)


def _gated(fields: Mapping[str, Any], size: float, kernels: Kernels) -> float:
    """Output of the first linear module, twice as wide; activation of one half, the other half plus an offset, and their product, which is
    the input of the second (transformer/mlp.py, unfused)."""
    if kernels.fuses_activation(fields):
        return size * 2 * kernels.wide + kernels.linear(size, size)
    return size * 4 * kernels.wide + kernels.linear(size, size) + _clamped(fields, size, kernels)


def _clamped(fields: Mapping[str, Any], size: float, kernels: Kernels) -> float:
    """Copies of both halves between limits, where a family has them; masks of what was inside."""
    return size * 2 * kernels.wide if fields.get("activation_func_clamp_value") is not None else 0.0


def _attention(fields: Mapping[str, Any], layout: Layout, tokens: Tokens, kernels: Kernels) -> Iterator[Term]:
    hidden, channels = fields["hidden_size"], fields["kv_channels"]
    heads, groups = fields["num_attention_heads"] // layout.tp, fields["num_query_groups"] / layout.tp
    yield kernels.norm("attention", tokens.hidden, hidden)
    yield Term("attention", kernels.linear(tokens.hidden * hidden, tokens.sequence * hidden))
    if fields.get("qk_norm_over_heads"):  # in moerl's own module, as Transformer Engine's
        yield from (Term("attention", tokens.sequence * (number * channels * kernels.wide + 4)) for number in (heads, groups))
    elif fields.get("qk_layernorm"):
        yield kernels.norm("attention", tokens.sequence * heads, channels)
        yield kernels.norm("attention", tokens.sequence * groups, channels)
    yield Term("attention", kernels.rotary(fields, tokens, round(channels * fields.get("rotary_percent", 1.0))))
    yield from kernels.attention(tokens, heads, groups, channels, channels, frozenset())
    output = tokens.sequence * heads * channels
    if fields.get("attention_output_gate"):  # output, gate, and its sigmoid in float32 (attention.py, _apply_output_gate)
        yield Term("attention", output * (2 * kernels.wide + 4))
    yield Term("attention", kernels.attention_output(output))


def _latent_attention(fields: Mapping[str, Any], layout: Layout, tokens: Tokens, kernels: Kernels) -> Iterator[Term]:
    """transformer/multi_latent_attention.py: down-projections on the own part of a sequence, up-projections on all of it."""
    hidden, heads, rank, latent = (fields[name] for name in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank"))
    plain, rotary, value = (fields[name] for name in ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"))
    heads //= layout.tp
    up = frozenset[RecomputeModule]({"mla_up_proj"})
    yield kernels.norm("attention", tokens.hidden, hidden, frozenset({"layernorm"}))
    yield _norm_output(fields, tokens, kernels)
    if kernels.copies:
        yield Term("attention", kernels.linear(tokens.hidden * hidden, 0) * (1 if rank is None else 2))
    for width in (rank, latent):
        if width is not None:
            yield kernels.norm("attention", tokens.hidden, width, up)
            yield Term("attention", kernels.linear(tokens.hidden * width, tokens.sequence * width), up)
    # In its place the channels of keys that are rotated, which all heads share.
    yield Term("attention", kernels.rotary(fields, tokens, rotary), up, tokens.sequence * rotary * kernels.wide)
    # Packed values get as many channels as keys have (_prepare_mla_core_attention_value).
    padding = max(plain + rotary - value, 0) if kernels.megatron >= (0, 18) else 0
    yield from kernels.attention(tokens, heads, heads, plain + rotary, value, up, padding=padding)
    yield Term("attention", kernels.attention_output(tokens.sequence * heads * value))


def _sparse_attention(fields: Mapping[str, Any], layout: Layout, tokens: Tokens, kernels: Kernels) -> Iterator[Term]:
    """transformer/experimental_attention_variant: absorbed_mla.py, whose heads share one key of the width of the latent, and dsa.py. An
    estimate by reading: indexers keep nothing, as they are not trained."""
    hidden, heads, rank, latent = (fields[name] for name in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank"))
    plain, rotary, value = (fields[name] for name in ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"))
    heads //= layout.tp
    up = frozenset[RecomputeModule]({"mla_up_proj"})
    yield kernels.norm("attention", tokens.hidden, hidden, frozenset({"layernorm"}))
    yield _norm_output(fields, tokens, kernels)
    for width in (rank, latent):
        yield kernels.norm("attention", tokens.hidden, width)
        yield Term("attention", tokens.hidden * width * kernels.wide)
    yield Term("attention", kernels.rotary(fields, tokens, rotary) + tokens.sequence * heads * (plain + rotary) * kernels.wide, up)
    yield Term("attention", tokens.sequence * (heads + 1) * (latent + rotary) * kernels.wide, up)
    chosen = min(fields["dsa_indexer_topk"], tokens.sequence * layout.cp)
    core = tokens.sequence * (heads * latent * kernels.wide + chosen * 8)
    if kernels.scores_sparsely:
        core += tokens.sequence * heads * 4
    else:  # weights of every query for all keys, in float32 and as they are multiplied
        core += heads * tokens.sequence * tokens.sequence * layout.cp * (4 + kernels.wide)
    yield Term("attention", core, frozenset({"core_attn"}))
    yield Term("attention", kernels.attention_output(tokens.sequence * heads * value))


def _delta_net(fields: Mapping[str, Any], layout: Layout, tokens: Tokens, kernels: Kernels) -> Iterator[Term]:
    """ssm/gated_delta_net (0.19) and the kernels of flash-linear-attention that it calls. An estimate by reading: projections, what the
    convolution puts out, copies of queries and keys for each value head, of values and gates, 64 numbers a head for the chunk of a token,
    the output before and behind its norm, and the gate's activation in float32."""
    hidden, keys, values = fields["hidden_size"], fields["linear_num_key_heads"], fields["linear_num_value_heads"]
    key, value = keys * fields["linear_key_head_dim"], values * fields["linear_value_head_dim"]
    yield kernels.norm("attention", tokens.hidden, hidden)
    yield Term("attention", kernels.linear(tokens.hidden * hidden, tokens.sequence * hidden))
    repeated = 2 * values * fields["linear_key_head_dim"]
    inputs, mixed = 2 * key + 2 * value + 2 * values, 2 * key + value
    kept = inputs + mixed + 2 * key + repeated + 2 * value + 64 * values + 2 * value
    yield Term("attention", tokens.sequence * (kept * kernels.wide + value * 4 + values * 8))
    yield Term("attention", kernels.attention_output(tokens.sequence * value))


def _norm_output(fields: Mapping[str, Any], tokens: Tokens, kernels: Kernels) -> Term:
    """Output of a norm that is a module of its own; whoever takes it keeps the same tensor."""
    return Term("attention", tokens.hidden * fields["hidden_size"] * kernels.wide, frozenset({"layernorm"}))


def _experts(fields: Mapping[str, Any], layout: Layout, tokens: Tokens, kernels: Kernels) -> Iterator[Term]:
    """transformer/moe: router.py, moe_utils.py (unfused), token_dispatcher.py (alltoall), experts.py (TEGroupedMLP), shared_experts.py."""
    hidden, number, top_k = fields["hidden_size"], fields["num_moe_experts"], fields["moe_router_topk"]
    whole = frozenset[RecomputeModule]({"moe"})
    yield kernels.norm("mlp", tokens.hidden, hidden, frozenset({"layernorm"}))
    yield _norm_output(fields, tokens, kernels)
    if (shared := fields.get("moe_shared_expert_intermediate_size")) is not None:
        takes = kernels.linear(tokens.hidden * hidden, tokens.sequence * hidden, is_shared=True)
        # The output before its gate (transformer/moe/shared_experts.py), whose input is the output of the norm.
        gate = tokens.hidden * hidden * kernels.wide if fields.get("moe_shared_expert_gate") else 0.0
        kept = takes + _gated(fields, tokens.sequence * shared // layout.tp, kernels)
        yield Term("mlp", kept, frozenset({"shared_experts", "moe"}))
        yield Term("mlp", gate, whole)
    # Scores of all experts in float32, chosen indices twice, chosen scores; and by which copies are picked: probabilities of all in float32
    # and where a token goes (a byte each), since 0.17 the order of all and the chosen once more.
    picked = number * 8 + top_k * 8 if kernels.megatron >= (0, 17) else number * 5
    yield Term("experts", tokens.hidden * (number * 4 + top_k * 20 + picked), whole)
    ffn = fields["moe_ffn_hidden_size"] / layout.etp
    yield Term("experts", kernels.linear(tokens.routed * hidden, tokens.routed * hidden) + tokens.routed * 4, whole)
    yield Term("experts", tokens.routed * 2 * ffn * kernels.wide, whole)
    # As in `_gated`, and the product before it is multiplied by the probability: recomputed together.
    product = kernels.linear(tokens.routed * ffn, tokens.routed * ffn)
    kept = 0.0 if kernels.fuses_activation(fields) else tokens.routed * 3 * ffn * kernels.wide
    activated = kept + _clamped(fields, tokens.routed * ffn, kernels)
    yield Term("experts", activated + product, frozenset({"moe_act", "moe"}))
