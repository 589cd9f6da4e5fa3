"""Settings of how a group of training ranks is cut, and the sizes that follow: `train.layout`.

Megatron's order: world = tp * cp * dp * pp for the dense part and etp * ep * edp * pp for the experts.
"""

from dataclasses import dataclass

from moerl.config.schema.strict import Size, Strict


@dataclass(frozen=True, kw_only=True)
class Layout(Strict):
    """Parallel sizes of one Megatron group. dp and edp follow from them."""

    ranks: Size = 1
    """Training processes, one per GPU."""
    tp: Size = 1
    """Tensor parallel; sequence parallel is on whenever tp > 1."""
    pp: Size = 1
    """Pipeline stages."""
    vpp: Size = 1
    """Model chunks per pipeline stage (interleaved schedule)."""
    first_stage_layers: Size | None = None
    """Transformer layers of the first stage; None: its even share. The first stage also holds the embedding."""
    last_stage_layers: Size | None = None
    """Transformer layers of the last stage; None: its even share. The last stage also holds the output layer and the loss."""
    embedding_as_layer: bool = False
    """Count the embedding as one layer when layers are shared out evenly, so that the first chunk gets one layer fewer."""
    loss_as_layer: bool = False
    """Count output layer and loss as one layer, so that the last chunk gets one layer fewer."""
    cp: Size = 1
    """Context parallel."""
    ep: Size = 1
    """Expert parallel."""
    etp: Size = 1
    """Tensor parallel size of the experts, independent of tp."""

    @property
    def dp(self) -> int:
        return self.ranks // (self.tp * self.pp * self.cp)

    @property
    def edp(self) -> int:
        return self.ranks // (self.ep * self.etp * self.pp)

    @property
    def sequence_multiple(self) -> int:
        """Every packed sequence is padded to a multiple of this: context parallelism cuts it into 2 * cp chunks (zig-zag)."""
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def token_multiple(self) -> int:
        """Packed tokens of a micro-batch are padded to a multiple of this: sequence parallelism cuts each cp slice into tp parts."""
        return self.tp * self.sequence_multiple

    @property
    def count_multiple(self) -> int:
        """A mini-batch has a multiple of this many micro-batches per rank: the interleaved schedule runs them in groups of pp."""
        return self.pp if self.vpp > 1 else 1

    @property
    def waits_in_rounds(self) -> bool:
        """Data-parallel ranks exchange tokens in every layer when experts are spread over them, so each waits for the slowest."""
        return self.ep * self.etp > self.tp * self.cp
