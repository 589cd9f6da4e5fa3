"""Settings of the models beside the policy: `critic` and `outcome_model`, which are there if the algorithm needs them, and teachers."""

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from moerl.config.schema.layout import Layout
from moerl.config.schema.strict import NotNegative, Strict
from moerl.config.schema.train_config import OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class CriticConfig(Strict):
    """Model with a value head, for algorithm.advantage.kind=gae: half the squared distance of its values from the returns is its loss."""

    path: str | None = None
    """Directory of the Hugging Face checkpoint it starts from, with the policy's tokenizer; `score.weight` [1, hidden] in it is the head,
    which else begins at 0. None: the policy's initial weights."""
    layout: Layout | None = None
    """Layout on ranks of its own, so that GPUs are needed for both. None: on the policy's ranks, whose layout it has; with
    train.offload it leaves the GPU while it is not asked."""
    optimizer: OptimizerConfig | None = None
    """None: the policy's."""
    clip: Annotated[float, Field(gt=0)] | None = 0.2
    """Bound on the move of a value in a step, as clip_low is for a ratio; None: there is none."""
    warmup_steps: NotNegative = 0
    """First steps in which the critic alone learns: the policy's learning rate is 0."""


@dataclass(frozen=True, kw_only=True)
class OutcomeModelConfig(Strict):
    """Model that tells right answers from wrong ones by its log-probs, for algorithm.advantage.kind=prime. It learns from the step's
    answers after it was asked: cross-entropy of sigmoid(beta * sum of (log-prob - its initial weights')), arXiv:2502.01456."""

    path: str | None = None
    """Directory of the Hugging Face checkpoint it starts from, with the policy's tokenizer. None: the policy's initial weights."""
    layout: Layout | None = None
    """Layout on ranks of its own; None: on the policy's ranks, whose layout it has."""
    optimizer: OptimizerConfig | None = None
    """None: the policy's."""
    right_above: float = 0.5
    """Reward, as it was scored, above which an answer is right."""


@dataclass(frozen=True, kw_only=True)
class TeacherConfig(Strict):
    path: str
    """Directory of its Hugging Face checkpoint, with the policy's tokenizer."""
    data_sources: tuple[str, ...] = ()
    """It teaches prompts of these (data_source of a row); none: those that no other teacher names."""
    layout: Layout | None = None
    """Layout on ranks of its own; None: on the policy's ranks, whose layout it has."""


@dataclass(frozen=True, kw_only=True)
class DistillationConfig(Strict):
    """On-policy distillation: (log-prob - teacher's) of every token of the policy's own answers, with the gradient of a policy loss. One
    teacher, several by data_source, or the policy itself with an answer before its eyes (arXiv:2601.19897)."""

    teachers: dict[str, TeacherConfig] = field(default_factory=dict)
    """Teachers by name."""
    shown: str | None = None
    """Where no teacher is: the policy as it is after this text at the end of the prompt's last message, with the data set's answer for
    {answer}. None: there must be a teacher."""
    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Factor of this component of the loss."""
    trains_rewards: bool = False
    """Beside it, the algorithm's loss; a prompt may then have no teacher. false: this alone."""
