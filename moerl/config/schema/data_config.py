"""Settings of prompts, rewards and evaluations: `data`, `reward`, `eval`."""

from dataclasses import dataclass, field
from datetime import date
from typing import Annotated, Any, Literal

from pydantic import Field

from moerl.config.schema.strict import NotNegative, Positive, Seconds, Strict

_SHUFFLE = "A new order each epoch, a function of the run's seed and the epoch."
_CHAT_TEMPLATE = "Render `prompt` with the tokenizer's chat template; false concatenates the contents of its messages."
_CHAT_TEMPLATE_KWARGS = "More values that the chat template reads, as {enable_thinking: false}; tools and documents too."
_TEMPLATE_DATE = "Day that the chat template writes, as gpt-oss's does (strftime_now); null: today's: other prompts tomorrow."
_MAX_PROMPT_TOKENS = "Longest prompt that is taken, with its chat template; the model's context holds it and the response."
_OVERLONG_PROMPTS = "A prompt over max_prompt_tokens stops the run before it starts (error), or is left out with a warning (drop)."


@dataclass(frozen=True, kw_only=True)
class _DataBase(Strict):
    """Described by Field: pydantic reads a string under a field only in the class that is the section."""

    shuffle: Annotated[bool, Field(description=_SHUFFLE)] = True
    chat_template: Annotated[bool, Field(description=_CHAT_TEMPLATE)] = True
    chat_template_kwargs: Annotated[dict[str, Any], Field(description=_CHAT_TEMPLATE_KWARGS)] = field(default_factory=dict)
    template_date: Annotated[date | None, Field(description=_TEMPLATE_DATE)] = None
    max_prompt_tokens: Annotated[int, Field(gt=0, description=_MAX_PROMPT_TOKENS)] = 1024
    overlong_prompts: Annotated[Literal["error", "drop"], Field(description=_OVERLONG_PROMPTS)] = "error"


@dataclass(frozen=True, kw_only=True)
class FileData(_DataBase):
    """Rows in verl's schema: prompt (chat list), reward_model.ground_truth, data_source, extra_info."""

    kind: Literal["files"] = "files"
    files: tuple[str, ...]
    """.parquet or .jsonl, in order."""


@dataclass(frozen=True, kw_only=True)
class GymData(_DataBase):
    """Procedural tasks of reasoning-gym, scored by the same package."""

    kind: Literal["gym"] = "gym"
    task: str
    """Name of a reasoning-gym dataset, e.g. chain_sum."""
    args: dict[str, Any] = field(default_factory=dict)
    """Passed to the dataset's own configuration."""
    size: Positive = 1000


@dataclass(frozen=True, kw_only=True)
class TinyData(_DataBase):
    """Tasks small enough to learn from scratch on a laptop."""

    kind: Literal["tiny"] = "tiny"
    task: Literal["repeat", "add"]
    """repeat: say a digit eight times. add: the sum of two numbers below 100."""
    size: Positive = 1000


DataConfig = Annotated[FileData | GymData | TinyData, Field(discriminator="kind")]


Isolation = Literal["strict", "network", "off"]


@dataclass(frozen=True, kw_only=True)
class RewardTerm(Strict):
    kind: Literal["math", "exact", "prefix", "format", "gym", "function"]
    """math: math-verify on the last answer. exact: text equals ground_truth. prefix: share of ground_truth's positions that
    agree. format: `pattern` matches the whole text. gym: the task's own scorer. function: `path`, verl's signature."""
    weight: float = 1.0
    pattern: str | None = None
    """Regular expression of kind=format, matched against the whole response."""
    path: str | None = None
    """Function of kind=function: `file.py:name` or `package.module:name` of f(data_source, solution_str, ground_truth, extra_info)."""
    isolation: Isolation = "strict"
    """Reach of a check. strict: no network, no writing but in a temporary directory of its worker, no reading but of the system,
    Python and the function's directory, no environment variables but those that Python needs. network: strict, and IP sockets, for a
    function that asks a remote judge. off: all that the run may. It begins when the function's module has been imported."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig(Strict):
    terms: dict[str, RewardTerm]
    """The reward is the weighted sum; each term is reported under its name."""
    timeout_seconds: Seconds = 10.0
    """One check. A verifier that takes longer is killed and the sample is marked, not the run."""
    num_workers: Positive = 1


@dataclass(frozen=True, kw_only=True)
class EvalDataset(Strict):
    data: DataConfig
    """Asked in its own order (shuffle: a function of eval.seed)."""
    reward: RewardConfig | None = None
    """Scorer of its answers. None: the run's reward."""
    num_prompts: Positive | None = None
    """At most so many, the first of its order. None: all."""
    samples: Positive = 1
    """Samples of each prompt: n."""
    pass_at: tuple[Positive, ...] = (1,)
    """Every k of pass@k: the chance that one of k samples passes, estimated from n without bias (arXiv:2107.03374). At most n. For k=1
    it is the share of samples that pass (mean@n)."""
    pass_reward: float | None = None
    """A sample passes with this reward or a higher one. None: with the most that the terms give if each is at most 1."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Strict):
    """Measurements of `moerl eval`, and of a run while it trains."""

    datasets: dict[str, EvalDataset]
    """Data sets by the names that metrics and files have."""
    every: NotNegative = 0
    """Steps between evaluations of a run, which begin before the first step and end after the last; 0: only `moerl eval` evaluates."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """0: the likeliest token always, hence one sample of a prompt."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_response_tokens: Positive | None = None
    """None: rollout.max_response_tokens."""
    seed: int = 1
    """Seed of the rows that kind=tiny and kind=gym make up, of the order, and of sampling. Other than the run's, whose rows it trains
    on."""
