"""One prompt to one scored group: sample it group_size times, score every completion."""

import asyncio
import hashlib
import socket
from dataclasses import replace

from moerl.config.derive.model_configs import routes_to_replay
from moerl.config.schema.run_config import RunConfig
from moerl.rewards.reward_pool import RewardPool
from moerl.rollout.fleet.collector import Answer
from moerl.rollout.fleet.rollout_pool import RolloutPool
from moerl.types.completion import SamplingParams
from moerl.types.errors import DataError, Origin
from moerl.types.groups import Group, Prompt, Sample, Score


class GroupRunner:
    def __init__(self, config: RunConfig, *, pool: RolloutPool, rewards: RewardPool, stop_token_ids: tuple[int, ...]):
        self._config, self._pool, self._rewards = config, pool, rewards
        self._stop_token_ids = stop_token_ids
        self._returns_routes = routes_to_replay(config) is not None
        self._has_greedy = "greedy_sample" in config.algorithm.needs

    async def run(self, prompt: Prompt) -> Group:
        """Raises DataError if not one completion of the prompt could be scored, EngineError for routes that are not the completion's."""
        outcomes = await asyncio.gather(
            *(self._sample(prompt, index) for index in range(self._config.group_size)),
            *([self._sample(prompt, self._config.group_size, is_greedy=True)] if self._has_greedy else []),
        )
        outcomes, greedy = (outcomes[:-1], outcomes[-1].score) if self._has_greedy else (outcomes, None)
        samples = tuple(sample for sample in outcomes if sample.score.error is None)
        errors = tuple(sample.score.error for sample in outcomes if sample.score.error is not None)
        if not samples:
            raise DataError(
                f"prompt {prompt.index} ({prompt.data_source}): none of its {len(errors)} samples could be scored; the first: {errors[0]}"
            ).began_in(Origin(who="reward worker", node=socket.gethostname(), doing="rollout"))
        if greedy is not None and greedy.error is not None:
            return Group(prompt=prompt, samples=samples, errors=(*errors, f"at temperature 0: {greedy.error}"), lacks_greedy=True)
        return Group(prompt=prompt, samples=samples, errors=errors, greedy=greedy)

    async def _sample(self, prompt: Prompt, index: int, *, is_greedy: bool = False) -> Sample:
        rollout = self._config.rollout
        sampling = SamplingParams(
            max_tokens=rollout.max_response_tokens,
            # The prompt's index is unique over the run, so no two samples of any two steps share a seed.
            seed=seed_of(self._config.seed, prompt.index, index),
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            filtered=self._config.filters_samples,
            stop_token_ids=self._stop_token_ids,
            returns_routes=self._returns_routes,
        )
        if is_greedy:
            sampling = replace(sampling, temperature=0.0, top_p=1.0, top_k=0, filtered=False, returns_routes=False)
        request_id, session = f"{prompt.index}-{index}", str(prompt.index)
        answer, score = await answered(self._pool, self._rewards, prompt, sampling, request_id=request_id, session=session)
        return Sample(completion=answer.completion, score=score)


async def answered(
    pool: RolloutPool, rewards: RewardPool, prompt: Prompt, sampling: SamplingParams, *, request_id: str, session: str
) -> tuple[Answer, Score]:
    """One sample of the prompt. `session`: of requests that share it."""
    answer = await pool.generate(prompt.token_ids, sampling, request_id, session=session)
    return answer, await rewards.score(prompt, answer.text)


def seed_of(*parts: int | str) -> int:
    """63 bits, a function of the parts."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
