"""One prompt to one scored group: sample it group_size times, score every completion."""

import asyncio
import hashlib
import socket
from typing import Protocol

from moerl.config.router_replay import routes_to_replay
from moerl.config.schema import RunConfig
from moerl.rewards.pool import RewardPool
from moerl.rollout.pool import RolloutPool
from moerl.rollout.routes import check_routes
from moerl.types import Completion, DataError, Group, Origin, Prompt, Sample, SamplingParams


class Decoder(Protocol):
    """The part of a tokenizer that turns tokens into the text rewards see."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


class GroupRunner:
    def __init__(self, config: RunConfig, *, pool: RolloutPool, rewards: RewardPool, tokenizer: Decoder, stop_token_ids: tuple[int, ...]):
        self._config, self._pool, self._rewards, self._tokenizer = config, pool, rewards, tokenizer
        self._stop_token_ids = stop_token_ids
        self._routes = routes_to_replay(config)

    async def run(self, prompt: Prompt) -> Group:
        """Raises DataError if not one completion of the prompt could be scored, EngineError for routes that are not the completion's."""
        outcomes = await asyncio.gather(*(self._sample(prompt, index) for index in range(self._config.group_size)))
        samples = tuple(sample for sample in outcomes if sample.score.error is None)
        errors = tuple(sample.score.error for sample in outcomes if sample.score.error is not None)
        if not samples:
            raise DataError(
                f"prompt {prompt.index} ({prompt.data_source}): none of its {len(errors)} samples could be scored; the first: {errors[0]}"
            ).began_in(Origin(who="reward worker", node=socket.gethostname(), doing="rollout"))
        return Group(prompt=prompt, samples=samples, errors=errors)

    async def _sample(self, prompt: Prompt, index: int) -> Sample:
        rollout = self._config.rollout
        sampling = SamplingParams(
            max_tokens=rollout.max_response_tokens,
            seed=sample_seed(self._config.seed, prompt.index, index),
            temperature=rollout.temperature,
            stop_token_ids=self._stop_token_ids,
            returns_routes=self._routes is not None,
        )
        completion = await self._pool.generate(prompt.token_ids, sampling, f"{prompt.index}-{index}", session=str(prompt.index))
        if self._routes is not None and completion.token_ids:
            # In a thread: it takes about 10 ms per megabyte, and other completions are arriving.
            await asyncio.to_thread(check_routes, completion, num_prompt=len(prompt.token_ids), shape=self._routes)
        text = self._text(completion)
        return Sample(completion=completion, text=text, score=await self._rewards.score(prompt, text))

    def _text(self, completion: Completion) -> str:
        return self._tokenizer.decode(list(completion.token_ids), skip_special_tokens=True)


def sample_seed(run_seed: int, prompt_index: int, sample_index: int) -> int:
    """63 bits. The prompt index is unique over the run, so no two samples of any two steps share a seed."""
    digest = hashlib.blake2b(f"{run_seed}/{prompt_index}/{sample_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
