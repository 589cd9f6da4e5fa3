"""Bytes that the CPU's reference of Transformer Engine keeps (megatron_patches/reference), in the place of what the real one does."""

from collections.abc import Iterator

from moerl.config.schema.train_config import SelectiveRecompute, TrainConfig
from moerl.planner.layer_activations import Kernels, Term, Tokens


class ReferenceKernels(Kernels):
    def __init__(self, train: TrainConfig, *, num_sequences: int):
        """`num_sequences`: of a micro-batch, all as long."""
        super().__init__(train, on_gpu=False)
        self._layout, self._num_sequences = train.layout, num_sequences
        self._recomputed = train.recompute.modules if isinstance(train.recompute, SelectiveRecompute) else ()
        self._computed = max(self.wide, 4)

    def linear(self, local, gathered, *, is_shared=False) -> float:
        """The gathered input (linear.py)."""
        if self._layout.tp == 1:
            return 0.0 if is_shared else local * self.wide
        return gathered * self.wide

    def attention(self, tokens: Tokens, heads, groups, key, value, up, *, padding=0) -> Iterator[Term]:
        """What goes into scaled_dot_product_attention and comes out (attention.py). Without a kernel for it all scores are kept."""
        rows, wide = tokens.sequence, self.wide
        keys = rows * self._layout.cp  # of all context-parallel ranks
        unpadded, value = value, value + padding
        is_fused, is_cut = key == value, self._layout.cp > 1
        width = wide if is_fused else self._computed
        size = rows * heads * key * width + keys * groups * (key + value) * width + rows * 16
        if is_fused:  # its output is the projection's input, unless it is put together from sequences
            size += rows * heads * (4 + (value * wide if is_cut else 0))
        if is_cut or not is_fused:  # a mask, or scores, of each sequence
            size += rows * (keys // self._num_sequences) * (wide if is_fused else heads * width)
        yield Term("attention", size, frozenset({"core_attn"}))
        if "core_attn" in self._recomputed and not up & set(self._recomputed):
            # Values are a view of what they were cut from.
            is_wide = is_fused and not padding
            inputs = 2 * heads * key + groups * (2 * key + unpadded) if is_wide else heads * (2 * key + unpadded)
            yield Term("attention", rows * inputs * wide)

    def rotary(self, fields, tokens: Tokens, channels) -> float:
        """None of its own (attention/rope.py), but in latent attention, which Megatron turns itself."""
        return super().rotary(fields, tokens, channels) if fields.get("multi_latent_attention") else 0.0

    def attention_output(self, size: float) -> float:
        return size * self.wide
