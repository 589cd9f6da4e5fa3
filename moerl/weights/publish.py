"""Publish a version to the rollout servers: pause, push, resume, and from time to time the canary."""

from collections.abc import Sequence

from moerl.config.schema import RunConfig
from moerl.rollout.pool import RolloutPool
from moerl.train.group import TrainGroup
from moerl.types import Prompt
from moerl.weights.canary import CanaryResult, run_canary
from moerl.weights.sync import WeightSync, resolve_transport

_CANARY_TOKENS = 8


class WeightPublisher:
    def __init__(self, config: RunConfig, *, train: TrainGroup, pool: RolloutPool, canary_prompts: Sequence[Prompt]):
        """Build it after the pool has started: receivers are known then."""
        self._config, self._train, self._pool = config, train, pool
        self._prompts = [prompt.token_ids for prompt in canary_prompts]
        self._num_pushes = 0
        self._sync: WeightSync | None = None

    async def push(self, version: int) -> CanaryResult | None:
        """Requests in flight stop where they are and go on with the new weights. The canary's result, when it ran."""
        if self._sync is None:
            hosts = [self._config.rollout.host] * self._config.rollout.num_servers
            transport = resolve_transport(self._config.weights.transport, source_host=await self._train.host(), receiver_hosts=hosts)
            self._sync = WeightSync(self._train, self._pool.receivers(), transport=transport)
        await self._pool.pause("keep")
        await self._sync.push(version)
        await self._pool.resume()
        self._num_pushes += 1
        return await self._canary(version) if self._canary_is_due() else None

    def _canary_is_due(self) -> bool:
        every = self._config.weights.canary_every
        return self._num_pushes == 1 or (every > 0 and self._num_pushes % every == 0)

    async def _canary(self, version: int) -> CanaryResult:
        return await run_canary(
            self._pool.engines,
            self._train.logprobs,
            self._prompts,
            max_tokens=min(_CANARY_TOKENS, self._config.rollout.max_response_tokens),
            limit=self._config.weights.mismatch_limit,
            version=version,
            temperature=self._config.rollout.temperature,
            seed=self._config.seed,
        )
