"""vLLM's part on a node of a server after the first: workers, or whole engines, that the first node's process gives orders to.

As `vllm serve --headless` (run_headless of vllm/entrypoints/cli/serve.py, 0.32).
"""

import logging
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, NoReturn

from moerl.rollout.engines.engine_arguments import Options
from moerl.rollout.engines.vllm.vllm_core import vllm_arguments
from moerl.types.errors import EngineError

logger = logging.getLogger(__name__)


def follow(options: Options) -> None:
    """Blocks until SIGTERM. EngineError when one of vLLM's processes on this node ends by itself, or does not start."""
    from vllm.usage.usage_lib import UsageContext

    config = vllm_arguments(options).create_engine_config(usage_context=UsageContext.ENGINE_CONTEXT, headless=True)
    with _ended_by_sigterm():
        if config.parallel_config.node_rank_within_dp > 0:
            _run_workers(config)
        else:
            _run_engines(config)


def _run_workers(config: Any) -> None:
    """The tensor-parallel ranks of this node, of a group whose first rank is on another one."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    try:
        executor = MultiprocExecutor(config, monitor_workers=False)
    except Exception as error:  # vLLM's own is of no class of its own, and the worker's is in the log
        raise EngineError(f"vLLM's workers on this node did not start: {error}") from error
    try:
        raise _first_end([worker.proc for worker in executor.workers])
    finally:
        for worker in executor.workers:
            worker.proc.kill()  # told to end it waits for ranks on other nodes, which may be gone
        executor.shutdown()


def _run_engines(config: Any) -> None:
    """The data-parallel groups that begin on this node, each with a scheduler of its own."""
    from vllm.utils.network_utils import get_tcp_uri
    from vllm.v1.engine.utils import CoreEngineProcManager
    from vllm.v1.executor import Executor

    parallel = config.parallel_config
    engines = CoreEngineProcManager(
        local_engine_count=parallel.data_parallel_size_local,
        start_index=parallel.data_parallel_rank,
        local_start_index=0,
        vllm_config=config,
        local_client=False,
        handshake_address=get_tcp_uri(parallel.data_parallel_master_ip, parallel.data_parallel_rpc_port),
        executor_class=Executor.get_class(config),
        log_stats=False,
    )
    try:
        raise _first_end(engines.processes)
    finally:
        engines.shutdown()


def _first_end(processes: Sequence[BaseProcess]) -> EngineError:
    """Blocks until one of them has ended."""
    ready = connection.wait([process.sentinel for process in processes])
    ended = next(process for process in processes if process.sentinel in ready)
    ended.join()
    what = f"vLLM's {ended.name} on this node ended first, with exit code {ended.exitcode}"
    logger.error("%s; the rest of the server ends with it", what)
    return EngineError(what)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Leaves the block at SIGTERM, so that vLLM ends its processes and removes what they share."""

    class Told(BaseException):
        pass

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Told

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    except Told:
        logger.info("told to end")
