"""Rules of `eval`: what cannot be measured, and what would be measured twice or on rows that the run trains on."""

import re
from collections.abc import Iterator

from moerl.config.derive.eval_settings import max_response_tokens, reward_of
from moerl.config.rules.facts import Facts
from moerl.config.schema.data_config import DataConfig, EvalConfig, EvalDataset, FileData, RewardConfig
from moerl.config.schema.run_config import RunConfig
from moerl.types.errors import Problem, problem


def eval_problems(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """Every rule of `eval` that is broken, and of the run's reward for its data."""
    yield from gym_problems(config.reward, config.data)
    if config.eval is None:
        return
    if not config.eval.datasets:
        reason, fix = "nothing would be evaluated", "eval.datasets.NAME.data={kind: files, files: [FILE.parquet]}, or eval=null"
        yield problem("eval.datasets", {}, "needs a data set", reason, fix)
    for name, dataset in config.eval.datasets.items():
        path = f"eval.datasets.{name}"
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            reason = "files and metrics are named after it"
            yield problem(path, name, "must be letters, digits, dots, dashes and underscores", reason, "eval.datasets.math-500={...}")
        yield from _sample_problems(path, dataset, config.eval)
        yield from _length_problems(path, dataset, config)
        yield from _seed_problems(path, dataset, config)
        if dataset.reward is not None or not any(gym_problems(config.reward, config.data)):  # once for the reward of the run
            yield from gym_problems(reward_of(config, dataset), dataset.data, f"{path}.")


def gym_problems(reward: RewardConfig, data: DataConfig, path: str = "") -> Iterator[Problem]:
    """`path`: of the section that has `reward` and `data`, with its dot."""
    for name, term in reward.terms.items():
        if term.kind == "gym" and data.kind != "gym":
            reason = f"the scorer belongs to a reasoning-gym task, and {path}data.kind={data.kind}"
            fix = f"{path}data.kind=gym with {path}data.task=TASK, or another kind"
            yield problem(f"{path}reward.terms.{name}.kind", "gym", f"needs {path}data.kind=gym", reason, fix)


def _sample_problems(path: str, dataset: EvalDataset, settings: EvalConfig) -> Iterator[Problem]:
    for index, k in enumerate(dataset.pass_at):
        if k > dataset.samples:
            reason = f"pass@{k} is estimated from the samples of a prompt, and {path}.samples={dataset.samples}"
            yield problem(f"{path}.pass_at.{index}", k, f"must be at most {dataset.samples}", reason, f"{path}.samples={k} or more")
    if settings.temperature == 0 and dataset.samples > 1:
        reason = "at eval.temperature=0 every sample of a prompt is the same"
        yield problem(f"{path}.samples", dataset.samples, "must be 1", reason, f"{path}.samples=1, or eval.temperature=0.6")


def _length_problems(path: str, dataset: EvalDataset, config: RunConfig) -> Iterator[Problem]:
    prompt, response, context = dataset.data.max_prompt_tokens, max_response_tokens(config), config.model.max_context
    if prompt + response > context:
        left = context - response
        reason = f"the longest prompt and a response of {response} tokens must fit into model.max_context={context}"
        fix = f"model.max_context={prompt + response}, or fewer eval.max_response_tokens"
        fix = fix if left < 1 else f"{path}.data.max_prompt_tokens={left}, or {fix}"
        yield problem(f"{path}.data.max_prompt_tokens", prompt, f"must be at most {max(left, 0)}", reason, fix)


def _seed_problems(path: str, dataset: EvalDataset, config: RunConfig) -> Iterator[Problem]:
    assert config.eval is not None
    ours, trained = dataset.data, config.data
    if isinstance(ours, FileData) or isinstance(trained, FileData) or config.eval.seed != config.seed:
        return
    if (ours.kind, ours.task) == (trained.kind, trained.task):
        reason = f"rows of kind={ours.kind} are made up from the seed: {path} would have rows that the run trains on"
        yield problem("eval.seed", config.eval.seed, f"must not be seed={config.seed}", reason, f"eval.seed={config.seed + 1}")
