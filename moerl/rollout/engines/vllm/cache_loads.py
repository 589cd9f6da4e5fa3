"""Pressure on the caches of vLLM's engines, of which there is one for each data-parallel group: they send it with their outputs."""

from typing import Any

from moerl.types.completion import ServerLoad


class CacheLoads:
    """Newest statistics of every engine. vLLM computes them only for whom it is given as `stat_loggers`."""

    def __init__(self) -> None:
        self._shares: dict[int, float] = {}
        self._num_preempted = 0

    @property
    def load(self) -> ServerLoad:
        return ServerLoad(cache_share=max(self._shares.values(), default=0.0), num_preempted=self._num_preempted)

    def record(self, engine: int, scheduled: Any, iteration: Any) -> None:
        """`scheduled`: vLLM's SchedulerStats, `iteration`: its IterationStats of one step; either may be None."""
        if scheduled is not None:
            self._shares[engine] = min(max(float(scheduled.kv_cache_usage), 0.0), 1.0)
        if iteration is not None:
            self._num_preempted += iteration.num_preempted_reqs

    def logger(self, config: Any, engine: int) -> Any:
        """A logger as vLLM makes one for each engine."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        loads = self

        class Logger(StatLoggerBase):
            def __init__(self) -> None: ...

            def record(self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0) -> None:
                loads.record(engine, scheduler_stats, iteration_stats)

            def log_engine_initialized(self) -> None: ...

        return Logger()
