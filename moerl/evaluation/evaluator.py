"""Samples every prompt of the evaluation data sets from the servers as they are, and scores the answers.

    prompts (order: eval.seed) -> at most as many requests at a time as the servers take -> rewards -> samples/NAME.jsonl -> Result

Nothing here is drawn from the run's prompts or seeds: an evaluation leaves the order of the training data and its samples as they are.
"""

import asyncio
import json
import logging
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import xxhash

from moerl import canary
from moerl.config.derive.eval_settings import max_response_tokens, reward_of
from moerl.config.schema.data_config import EvalConfig, EvalDataset
from moerl.config.schema.run_config import RunConfig
from moerl.evaluation.estimates import Outcome, Result, result_of
from moerl.models.plain_tokenizer import Tokenizer
from moerl.observe.observer import full_reward
from moerl.observe.records import read_records, replace_records, to_line
from moerl.rewards.reward_pool import RewardPool
from moerl.rollout.datasets.load_dataset import load_dataset
from moerl.rollout.fleet.collector import Answer
from moerl.rollout.fleet.rollout_pool import RolloutPool
from moerl.rollout.group_runner import answered, seed_of
from moerl.rollout.prompts import PromptSource
from moerl.types.completion import SamplingParams
from moerl.types.errors import ConfigError, DataError, Problem
from moerl.types.groups import Prompt, Score

logger = logging.getLogger(__name__)

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class _Loaded:
    name: str
    settings: EvalDataset
    prompts: PromptSource
    rewards: RewardPool
    pass_reward: float
    num_prompts: int


def evaluation_prompts(config: RunConfig, tokenizer: Tokenizer) -> dict[str, PromptSource]:
    """Rows of each data set of an evaluation. Raises DataError that names every one with rows that cannot be used,
    ConfigError as PromptSource."""
    assert config.eval is not None
    found, errors, problems = {}, [], list[Problem]()
    for name, settings in config.eval.datasets.items():
        try:
            found[name] = PromptSource(
                load_dataset(settings.data, seed=config.eval.seed), tokenizer, settings.data, seed=config.eval.seed,
                max_context=config.model.max_context, max_response_tokens=max_response_tokens(config),
                section=f"eval.datasets.{name}.data",
            )  # fmt: skip
        except ConfigError as error:
            problems += error.problems
        except DataError as error:
            errors.append(f"eval.datasets.{name}: {error}")
    if problems:
        raise ConfigError(problems)
    if errors:
        raise DataError("\n".join(errors))
    return found


class Evaluator:
    """`async with Evaluator(...) as evaluator: results = await evaluator.run(directory)`, as often as wanted."""

    def __init__(
        self, config: RunConfig, prompts: Mapping[str, PromptSource], *, pool: RolloutPool, rewards: RewardPool,
        stop_token_ids: tuple[int, ...],
    ):  # fmt: skip
        """`prompts`: of `evaluation_prompts`. `rewards`: started, of the run's own reward."""
        assert config.eval is not None
        self._settings: EvalConfig = config.eval
        self._pool, self._stop_token_ids = pool, stop_token_ids
        self._max_tokens = max_response_tokens(config)
        self._places = asyncio.Semaphore(config.rollout.num_servers * (config.rollout.max_running + config.rollout.max_queued))
        self._datasets = [self._load(config, name, prompts[name], rewards) for name in self._settings.datasets]
        self._own = [each.rewards for each in self._datasets if each.rewards is not rewards]

    def _load(self, config: RunConfig, name: str, prompts: PromptSource, rewards: RewardPool) -> _Loaded:
        settings = self._settings.datasets[name]
        reward, num_rows = reward_of(config, settings), prompts.num_rows
        return _Loaded(
            name=name,
            settings=settings,
            prompts=prompts,
            rewards=rewards if settings.reward is None else RewardPool(reward),
            pass_reward=full_reward(reward) if settings.pass_reward is None else settings.pass_reward,
            num_prompts=num_rows if settings.num_prompts is None else min(settings.num_prompts, num_rows),
        )

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            for rewards in self._own:
                await stack.enter_async_context(rewards)
            self._started = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._started.aclose()

    def some_prompts(self) -> list[Prompt]:
        """Prompts for a canary."""
        first = self._datasets[0]
        return [first.prompts.prompt_at(index) for index in range(min(first.num_prompts, canary.NUM_PROMPTS))]

    async def run(self, directory: Path) -> list[Result]:
        """Result of every data set, with the weights that the servers have. Samples that are in `directory` already are not made again."""
        return [await self._run(each, directory / "samples" / f"{each.name}.jsonl") for each in self._datasets]

    async def _run(self, dataset: _Loaded, path: Path) -> Result:
        prompts = [dataset.prompts.prompt_at(index) for index in range(dataset.num_prompts)]
        file = SampleFile(path, samples=dataset.settings.samples)
        file.keep(num_alike(file.found, prompts))
        if file.found:
            logger.info("%s: %d of %d prompts are there already", dataset.name, len(file.found), len(prompts))
        outcomes = [[outcome_of(record) for record in records] for records in file.found]  # not the records, which hold all text
        with file:
            async with aclosing(self._answers(dataset, prompts[len(outcomes) :])) as answers:
                async for records in answers:
                    file.add(records)
                    outcomes.append([outcome_of(record) for record in records])
        return result_of(dataset.name, outcomes, pass_at=dataset.settings.pass_at)

    async def _answers(self, dataset: _Loaded, prompts: Sequence[Prompt]) -> AsyncGenerator[list[Record], None]:
        """In the order of the prompts."""
        tasks = deque(asyncio.create_task(self._answer(dataset, prompt)) for prompt in prompts)
        try:
            while tasks:
                await asyncio.wait([tasks[0]])
                yield tasks.popleft().result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, dataset: _Loaded, prompt: Prompt) -> list[Record]:
        return await asyncio.gather(*(self._sample(dataset, prompt, index) for index in range(dataset.settings.samples)))

    async def _sample(self, dataset: _Loaded, prompt: Prompt, index: int) -> Record:
        settings, session = self._settings, f"eval-{dataset.name}-{prompt.index}"
        sampling = SamplingParams(
            max_tokens=self._max_tokens,
            seed=seed_of("eval", settings.seed, dataset.name, prompt.index, index),
            temperature=settings.temperature,
            top_p=settings.top_p,
            stop_token_ids=self._stop_token_ids,
        )
        async with self._places:  # what waits in the driver must not use up its deadline
            answer, score = await answered(self._pool, dataset.rewards, prompt, sampling, request_id=f"{session}-{index}", session=session)
        return record_of(prompt, index, answer, score, pass_reward=dataset.pass_reward)


def record_of(prompt: Prompt, index: int, answer: Answer, score: Score, *, pass_reward: float) -> Record:
    """Record of sample `index` of the prompt."""
    return {
        "prompt_index": prompt.index,
        "row": _digest(prompt),
        "sample": index,
        "data_source": prompt.data_source,
        "prompt": prompt.text,
        "ground_truth": prompt.ground_truth,
        "response": answer.text,
        "reward": score.reward,
        # A sum of weighted parts carries rounding.
        "passed": score.error is None and score.reward >= pass_reward - 1e-6,
        "parts": dict(score.parts),
        "length": answer.completion.num_tokens,
        "finish_reason": answer.completion.finish_reason,
        "error": score.error,
    }


def num_alike(found: Sequence[Sequence[Record]], prompts: Sequence[Prompt]) -> int:
    """How many of the prompts, from the first on, are those that `found` has samples of, with all that their scores were made from."""
    for number, (records, prompt) in enumerate(zip(found, prompts, strict=False)):
        digest = _digest(prompt)
        if any(record.get("row") != digest for record in records):
            return number
    return min(len(found), len(prompts))


def _digest(prompt: Prompt) -> str:
    """Digest of the row: what is asked, and what an answer to it is scored by."""
    row = [prompt.text, prompt.data_source, prompt.ground_truth, prompt.extra_info]
    return xxhash.xxh3_128_hexdigest(json.dumps(row, sort_keys=True, default=repr).encode())


def outcome_of(record: Mapping[str, Any]) -> Outcome:
    return Outcome(
        reward=record["reward"],
        passed=record["passed"],
        length=record["length"],
        truncated=record["finish_reason"] == "length",
        error=record["error"],
        parts=record["parts"],
    )


class SampleFile:
    """The samples of a data set, samples/NAME.jsonl: a line each, prompt after prompt, as they are made. Open to append in `with`.

    What was written before is kept if it belongs to the same rows, so that an evaluation that was stopped goes on where it was."""

    def __init__(self, path: Path, *, samples: int):
        """`samples` of each prompt."""
        self._path, self._samples = path, samples
        records = read_records(path) if path.exists() else []
        whole = len(records) // samples * samples
        self.found = [records[start : start + samples] for start in range(0, whole, samples)]
        """Outcomes of prompts 0, 1, ... that have all of their samples."""

    def keep(self, num_prompts: int) -> None:
        """The first `num_prompts` of those found, and nothing else."""
        self.found = self.found[:num_prompts]
        replace_records(self._path, [record for records in self.found for record in records])

    def add(self, records: Sequence[Record]) -> None:
        """The next prompt's."""
        self._file.writelines(to_line(record) for record in records)
        self._file.flush()

    def __enter__(self) -> Self:
        # A lone surrogate, which UTF-8 cannot hold, becomes its own escape, as in moerl/observe/records.py.
        self._file = self._path.open("a", encoding="utf-8", errors="backslashreplace", newline="\n")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
