"""Everything that crosses a process boundary, and the errors.

Plain picklable data: numpy and the standard library only, so that the login node can import it without torch.
Axis suffixes: `_T` tokens of one sequence or of a packed batch, `_G` samples of one group.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

if TYPE_CHECKING:
    from moerl.payloads import StoredCompletion

FinishReason = Literal["stop", "length", "abort"]
KILLED = 76
"""Exit code of a run one of whose processes was killed or crashed: the same command goes on from the newest checkpoint."""


# -- rollout ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One task to be sampled `group_size` times."""

    index: int
    """Position in the run's draw order, unique over all epochs. Sampling seeds derive from it."""
    token_ids: tuple[int, ...]
    """The rendered chat template, ready for an engine."""
    text: str
    """The same, as text: for dumps and people."""
    data_source: str
    ground_truth: str
    extra_info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one completion is drawn. Log-probs are always those of softmax(logits / temperature), before top-k and top-p."""

    max_tokens: int
    seed: int
    temperature: float = 1.0
    """0 means greedy; its log-probs are reported at temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    stop_token_ids: tuple[int, ...] = ()
    """Sampling one of these ends the completion; the token itself is part of it."""
    num_drawn: int = 0
    """How many tokens at the end of the prompt this completion drew before it was ended: the random numbers that follow are used."""
    returns_routes: bool = False
    """The completion brings the experts its tokens went to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """`num_tokens` consecutive tokens that were sampled with weights `version`."""

    version: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine returns: `token_ids` and `logprobs` have the same length, and so have the spans in total.

    Example: token_ids (17, 4, 1), logprobs (-0.2, -1.1, -0.01), spans (VersionSpan(version=3, num_tokens=3),).
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    routes: np.ndarray | None = field(default=None, compare=False)
    """uint8 or uint16 [prompt + response tokens - 1, layers, top_k], see RouteShape: the last token was sampled, not computed. None if
    they were not asked for or nothing was sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A reward and what it was made of."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    """Each term's unweighted value, by the name of the term."""
    error: str | None = None
    """Why this sample could not be scored; its reward is then 0 and it is left out of the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One scored completion. Its tokens, routes and text are in `completion.payload`."""

    completion: "StoredCompletion"
    score: Score


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All samples of one prompt. `samples` holds only those that could be scored; `errors` the reasons of the others."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    errors: tuple[str, ...] = ()

    @property
    def rewards_G(self) -> np.ndarray:
        return np.array([sample.score.reward for sample in self.samples], dtype=np.float64)

    @property
    def lengths_G(self) -> np.ndarray:
        return np.array([sample.completion.num_tokens for sample in self.samples], dtype=np.int64)

    @property
    def oldest_version(self) -> int:
        return min(span.version for sample in self.samples for span in sample.completion.spans)


# -- training --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """Sequences laid end to end. Sequence i is `[offsets[i], offsets[i + 1])` in every `_T` array.

    Values at token t belong to *that* token (its log-prob was predicted from token t - 1), so prompts hold zeros.
    """

    token_ids_T: np.ndarray  # int64
    response_mask_T: np.ndarray  # bool, True where the policy produced the token
    rollout_logprobs_T: np.ndarray  # float32, from the engine
    advantages_T: np.ndarray  # float32
    offsets: np.ndarray  # int64 [num_sequences + 1]
    old_logprobs_T: np.ndarray | None = None  # float32, from the trainer before the update
    reference_logprobs_T: np.ndarray | None = None  # float32, from the frozen initial model
    routes_T: np.ndarray | None = None  # uint8 or uint16 [T, layers, top_k], from the engine; unknown_route where it has none

    @property
    def num_sequences(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    @property
    def response_lengths(self) -> np.ndarray:
        before_T = np.concatenate([[0], np.cumsum(self.response_mask_T)])
        return before_T[self.offsets[1:]] - before_T[self.offsets[:-1]]

    def num_responses_from(self, position: int) -> int:
        """Response tokens with at least `position` tokens of their sequence before them."""
        position_T = np.arange(len(self.token_ids_T)) - np.repeat(self.offsets[:-1], self.lengths)
        return int((self.response_mask_T & (position_T >= position)).sum())

    @property
    def routes_shape(self) -> tuple[int, int] | None:
        return None if self.routes_T is None else (self.routes_T.shape[1], self.routes_T.shape[2])

    def without_routes(self) -> "TrainBatch":
        return replace(self, routes_T=None)

    def select(self, sequences: "np.ndarray | list[int]") -> "TrainBatch":
        """The named sequences, in that order."""
        spans = [slice(self.offsets[i], self.offsets[i + 1]) for i in sequences]

        def pick(column: np.ndarray | None) -> np.ndarray | None:
            return None if column is None else np.concatenate([column[s] for s in spans] or [column[:0]])

        columns = {name: pick(getattr(self, name)) for name in self.__slots__ if name.endswith("_T")}
        lengths = [s.stop - s.start for s in spans]
        return TrainBatch(**columns, offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))  # type: ignore[arg-type]

    laid_out = select


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStats:
    """Where a trainer's memory was; of the rank that holds most. Kinds and states are those of moerl/train/residency.py."""

    device_bytes: dict[str, dict[str, int]]
    """state -> kind -> bytes on the device when the trainer was last in that state."""
    host_bytes: dict[str, int]
    """kind -> bytes of copies in host memory."""
    transition_seconds: dict[str, float]
    """"asleep_to_scoring" and so on -> seconds since the update before this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Of memory to or from GPUs that trainer and servers share; what several moves took, where they have one name."""

    seconds: float
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingStats:
    """Where an update's tokens went, padding left out; the tuples have an entry per layer with experts."""

    layers: tuple[int, ...]
    """Their numbers in the model, from 0."""
    load_max: tuple[float, ...]
    """Of the busiest expert: its share of the layer's routes * experts - 1."""
    load_min: tuple[float, ...]
    """The same of the idlest; -1: it got no token."""
    load_mean: tuple[float, ...]
    """Mean over experts of the absolute value (the mean itself is always 0)."""
    dead_experts: tuple[int, ...]
    """Experts without a token."""
    replayed: float | None = None
    """Share of the routes that were replayed; None without replay."""
    overlap: tuple[float, ...] | None = None
    """Share of the replayed routes whose set of experts the router would have chosen itself, given what came before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """What one `TrainGroup.update` measured, reduced over every rank. `d` is trainer minus rollout log-prob of a token."""

    loss: float
    grad_norm: float
    learning_rate: float
    num_tokens: int
    """Response tokens trained on."""
    entropy: float
    """Mean over response tokens, in nats."""
    kl_old: float
    """k3 estimate of KL(policy || old policy) at the first mini-batch; exactly 0 when the old log-probs are the trainer's own."""
    kl_reference: float | None
    """k3 estimate of KL(policy || reference); None without a reference."""
    clip_fraction: float
    mismatch_mean: float
    """mean |d|"""
    mismatch_max: float
    """max |d|"""
    mismatch_kl: float
    """k3 estimate of KL(rollout || trainer): mean(exp(d) - d - 1)"""
    padding_fraction: float
    """Share of the micro-batch tokens that are padding."""
    rank_imbalance: float
    """Work of the busiest data-parallel rank divided by the mean over ranks; attention's quadratic cost included."""
    round_imbalance: float
    """The same if ranks wait for each other after every micro-batch, as they do when they share experts; never less."""
    mtp_loss: float | None = None
    """Mean cross-entropy of multi-token prediction over depths and response tokens, in nats; None if it is not trained."""
    routing: RoutingStats | None = None
    """None for a dense model, and where there is no model."""
    memory: MemoryStats | None = field(default=None, compare=False)
    """None where there is no model."""
    skipped_updates: tuple[str, ...] = ()
    """Where loss or gradient was not finite, for each mini-batch in which one was: it changed no weight and is in no statistic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint that became visible."""

    version: int
    num_bytes: int
    """Tensors of all ranks."""
    seconds: float
    """From the request to the rename."""
    blocked_seconds: float
    """During which training stood still."""


# -- errors: all picklable, one tree ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing wrong with a configuration, said so that it can be mended."""

    path: str
    value: object
    rule: str
    reason: str
    fix: str

    def __str__(self) -> str:
        text = f"{self.path} = {self.value!r}: {self.rule}\n    why: {self.reason}\n    fix: {self.fix}"
        return text.encode(errors="backslashreplace").decode()  # a name may be no UTF-8, which no terminal takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The process in which a failure began."""

    who: str
    """"rank 1 of 8", "rollout server 127.0.0.1:4000", "reward worker", "driver"."""
    node: str
    doing: str
    """Its phase, or the call that failed."""
    log: str = ""
    """The file to open; empty if it has none."""
    details: str = ""
    """For the failure report alone: the whole traceback, and what failed after it."""


class MoerlError(Exception):
    """Base of everything moerl raises for people."""

    origin: Origin | None = None
    """None: this process, where it was raised."""
    exit_code: int = 1
    """Of a run that ends with it."""

    def began_in(self, origin: Origin) -> Self:
        """Sets `origin`; for `raise Error(...).began_in(...)`."""
        self.origin = origin
        return self


class ConfigError(MoerlError, ValueError):
    """The configuration cannot run. Holds every problem found, not only the first."""

    def __init__(self, problems: "list[Problem]"):
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        count = len(self.problems)
        return f"{count} problem{'s' if count > 1 else ''} in the configuration\n" + "\n".join(f"* {p}" for p in self.problems)


class ConvertError(MoerlError, ValueError):
    """Checkpoints that cannot be converted, inspected or compared. Holds every problem found, not only the first."""

    def __init__(self, problems: "list[Problem]"):
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        count = len(self.problems)
        return f"{count} problem{'s' if count > 1 else ''} with the checkpoint\n" + "\n".join(f"* {p}" for p in self.problems)


class DataError(MoerlError, ValueError):
    """A dataset row cannot be used; names the file and the row."""


class TrainError(MoerlError, RuntimeError):
    """A train rank failed; carries that rank's traceback."""


class HangError(MoerlError, RuntimeError):
    """A phase missed its deadline. Names the processes that did not arrive, and the report with the stacks of all."""

    names: tuple[str, ...] = ()
    """Of the processes."""


class ResidencyError(TrainError):
    """A call that the trainer's state does not allow (it sleeps, or another call is running), or a move between states of shared GPUs that
    do not follow each other."""


class EngineError(MoerlError, RuntimeError):
    """A rollout server could not start, died, or refused a request."""


class EngineUnavailable(EngineError):
    """The server is gone, or may not serve now; another one can take the request, or the same one later."""


class StoreError(MoerlError, RuntimeError):
    """Ray's object store cannot hold, or has lost, what samples consist of."""


class WeightError(MoerlError, RuntimeError):
    """Trainer and engine do not hold the same weights."""


class CheckpointError(MoerlError, RuntimeError):
    """A checkpoint is missing, damaged, or of another model."""


class DynamicSamplingError(MoerlError, RuntimeError):
    """Dynamic sampling dropped every group it was allowed to draw; explains the reward distribution."""


class GuardError(MoerlError, AssertionError):
    """A run-time check of the trainer against the engine failed."""


class RunStopped(MoerlError):
    """A run that was asked to end did, with its last step saved: nothing failed."""

    def __init__(self, reason: str, exit_code: int):
        super().__init__(f"stopped: {reason}; the same command continues the run")
        self.exit_code = exit_code


class ReportError(MoerlError, RuntimeError):
    """A run directory holds no metrics, or damaged ones."""
