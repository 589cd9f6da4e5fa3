"""How a group of training ranks is cut: every parallel size and every divisibility rule in one place.

Megatron's order: world = tp * cp * dp * pp for the dense part and etp * ep * edp * pp for the experts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import ConfigDict

from moerl.config.derive.model_shape import ModelShape
from moerl.config.rules.pipeline_rules import contradictions, pipeline_problems
from moerl.config.schema.strict import Size
from moerl.types.errors import Problem


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Parallel sizes of one Megatron group. dp and edp follow from them."""

    __pydantic_config__ = ConfigDict(extra="forbid", use_attribute_docstrings=True)

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

    def problems(self, shape: ModelShape | None) -> Iterator[Problem]:
        """Every rule this layout breaks, for a model of `shape` if it is known."""
        yield from self._size_problems()
        if shape is not None:
            yield from self._model_problems(shape)

    def _size_problems(self) -> Iterator[Problem]:
        dense, expert = self.tp * self.pp * self.cp, self.ep * self.etp * self.pp
        if self.ranks % dense:
            yield _problem(
                "ranks",
                self.ranks,
                f"must be a multiple of tp * pp * cp = {dense}",
                "what remains after tp, pp and cp is data parallel, a whole number",
                _multiples(dense, self.ranks),
            )
        if self.ranks % expert:
            yield _problem(
                "ranks",
                self.ranks,
                f"must be a multiple of ep * etp * pp = {expert}",
                "what remains after ep, etp and pp replicates the experts, a whole number",
                _multiples(expert, self.ranks),
            )
        yield from contradictions(self)

    def _model_problems(self, shape: ModelShape) -> Iterator[Problem]:
        if shape.num_heads % self.tp:
            yield _problem(
                "tp",
                self.tp,
                f"must divide the model's {shape.num_heads} attention heads",
                "each rank owns whole heads",
                _divisors(shape.num_heads),
            )
        if shape.num_kv_heads % self.tp:
            yield _problem(
                "tp",
                self.tp,
                f"must divide the model's {shape.num_kv_heads} key/value heads",
                "moerl does not replicate key/value heads",
                _divisors(shape.num_kv_heads),
            )
        yield from pipeline_problems(self, shape.num_layers)
        if shape.num_experts is None:
            for name in ("ep", "etp"):
                if getattr(self, name) > 1:
                    yield _problem(
                        name, getattr(self, name), "must be 1 for a dense model", "there are no experts to distribute", f"{name}=1"
                    )
        else:
            if shape.num_experts % self.ep:
                yield _problem(
                    "ep",
                    self.ep,
                    f"must divide the model's {shape.num_experts} experts",
                    "each rank owns whole experts",
                    _divisors(shape.num_experts),
                )
            if shape.expert_ffn_size % self.etp:
                yield _problem(
                    "etp",
                    self.etp,
                    f"must divide the expert's inner size {shape.expert_ffn_size}",
                    "its columns are split evenly",
                    _divisors(shape.expert_ffn_size),
                )
            if shape.has_biased_experts and self.etp > 1:
                reason = "each rank that holds a part of an expert would add its bias (Megatron-Core, TransformerConfig.__post_init__)"
                yield _problem("etp", self.etp, "must be 1 for experts with biases", reason, "etp=1 and a larger ep")


def _problem(field: str, value: int, rule: str, reason: str, fix: str) -> Problem:
    return Problem(path=f"train.layout.{field}", value=value, rule=rule, reason=reason, fix=fix)


def _divisors(number: int) -> str:
    return "one of " + ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)


def _multiples(number: int, near: int) -> str:
    below, above = near // number * number, (near // number + 1) * number
    return f"ranks={above}" if below == 0 else f"ranks={below} or ranks={above}"
