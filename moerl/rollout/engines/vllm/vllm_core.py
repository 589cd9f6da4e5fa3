"""vLLM below this process, as a Core."""

import argparse
import asyncio
import logging
import os
from collections.abc import Awaitable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import torch

from moerl.config.derive.model_shape import read_config
from moerl.models.families.gpt_oss import layer_types
from moerl.rollout.engines.argument_check import QuietParser, argument_problems, version_problems
from moerl.rollout.engines.engine_arguments import Options, as_command_line
from moerl.rollout.engines.hf.hf_model import checkpoint_specs
from moerl.rollout.engines.process_push import needs_of_processes
from moerl.rollout.engines.vllm import vllm_cpu, vllm_cpu_fp8, vllm_launch
from moerl.rollout.server import wire
from moerl.rollout.server.contract import MemoryPart, engine_seed, version_spans
from moerl.types.completion import Completion, DraftCounts, SamplingParams, ServerLoad
from moerl.types.errors import EngineError, Problem, WeightError, problem
from moerl.types.push import Manifest, Needs, TensorSpec, TransportOffer

logger = logging.getLogger(__name__)

_SOCKETS = "VLLM_RPC_BASE_PATH"
"""In vLLM's environment: where its processes' sockets are."""
_WATCH_SECONDS = 1.0
"""Between two looks at whether vLLM's processes live."""

OWN_ARGUMENTS = {argument: setting for setting, argument in vllm_launch.NAMES.items()} | {
    "load_format": "leave it out: weights come by a push",
    "skip_tokenizer_init": "leave it out: tokens in, tokens out",
    "logprobs_mode": "leave it out: log-probs are those of the sampling temperature",
    "weight_transfer_config": "leave it out",
    "worker_extension_cls": "leave it out",
    "enable_sleep_mode": "placement.mode=colocated",
    "hf_overrides": "leave it out: config.json is the model's",
    "enable_return_routed_experts": "leave it out: routes of vllm are not replayed",
    "per_request_spec_decode_metrics": "leave it out",
    "enable_eplb": "rollout.layout.redundant_experts",
    "max_cudagraph_capture_size": "rollout.layout.cuda_graph_requests",
    "node_rank": "leave it out: moerl numbers the nodes of a server",
    "master_addr": "leave it out: moerl places the nodes of a server",
    "distributed_executor_backend": "leave it out: moerl starts the processes of every node",
    "expert_placement_strategy": "leave it out: a push brings experts in vLLM's linear order",
}
OWN_ARGUMENTS |= dict.fromkeys(["pipeline_parallel_size", "prefill_context_parallel_size"], "leave it out, or a larger rollout.layout.gpus")
OWN_ARGUMENTS |= {
    f"data_parallel_{name}": "leave it out: rollout.layout.dp and gpus_per_node say which groups a node has"
    for name in ("address", "backend", "external_lb", "hybrid_lb", "rank", "rpc_port", "size_local", "start_rank")
}
"""Arguments that moerl sets or relies on, and what to write instead."""

FAILED = "a step of the push failed: "
"""Begins what a worker raises about a push that it refuses. No other error of vLLM's is a verdict on a push."""


def find_problems(arguments: Mapping[str, Any], model: Mapping[str, Any] | None) -> list[Problem]:
    if wrong := version_problems("vllm", ("vllm", "vllm-cpu"), vllm_launch.SUPPORTED):
        return wrong
    has_gpu = torch.cuda.is_available()
    problems = argument_problems(_parser(), arguments, own=OWN_ARGUMENTS | ({} if has_gpu else vllm_cpu.OWN_ARGUMENTS), engine="vLLM")
    if model is None:
        return problems
    return [*problems, *_model_problems(model), *(() if has_gpu else vllm_cpu.model_problems(model))]


def _model_problems(model: Mapping[str, Any]) -> Iterator[Problem]:
    """Fields of config.json that vLLM's gpt-oss has in its source (model_executor/models/gpt_oss.py, layers/activation.py)."""
    if model.get("model_type") != "gpt_oss":
        return
    given = {"swiglu_limit": model.get("swiglu_limit", 7.0), "layer_types": layer_types(model)}
    for name, fixed in {"swiglu_limit": 7.0, "layer_types": layer_types({**model, "layer_types": None})}.items():
        if given[name] != fixed:
            reason = "vLLM's gpt-oss takes this whatever config.json says, and would compute other log-probs than the trainer"
            yield problem("model", f"{name} = {given[name]}", f"must be {fixed}", reason, "rollout.engine=hf")


def start(options: Options) -> "VLLMCore":
    from vllm.v1.engine.async_llm import AsyncLLM

    # vLLM's processes talk by sockets in /tmp, seven and more, and remove none of them.
    sockets = TemporaryDirectory(prefix="moerl-vllm-", dir=os.environ.get(_SOCKETS), ignore_cleanup_errors=True)
    os.environ[_SOCKETS] = sockets.name
    args = vllm_arguments(options)
    loads = CacheLoads()
    engine = AsyncLLM.from_engine_args(args, stat_loggers=[loads.logger])
    needs = needs_of(engine.vllm_config.parallel_config, specs_of(engine.vllm_config, torch.float32))
    core = VLLMCore(engine, needs, loads, sleeps=bool(args.enable_sleep_mode), sockets=sockets)
    core.watch()
    return core


def vllm_arguments(options: Options) -> Any:
    """vLLM's AsyncEngineArgs of this node. Sets the environment they need."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    parser = _parser()
    line = as_command_line(_own_arguments(options) | dict(options.engine_args), parser)
    return AsyncEngineArgs.from_cli_args(parser.parse_args(line))


def _own_arguments(options: Options) -> dict[str, Any]:
    model = read_config(options.model)
    shares = options.shares_gpus and torch.cuda.is_available()
    own = vllm_launch.arguments(replace(options, shares_gpus=shares), model) | {
        "logprobs_mode": "raw_logprobs",
        "weight_transfer_config": {"backend": "moerl"},
        "worker_extension_cls": "moerl.rollout.engines.vllm.vllm_worker.WorkerExtension",
        "disable_log_stats": True,
    }
    if options.layout.mtp_tokens:
        own["per_request_spec_decode_metrics"] = "summary"
    if options.layout.nodes > 1:
        os.environ["VLLM_HOST_IP"] = options.host  # vLLM would take the address of the default route, which other nodes may not reach
    if not torch.cuda.is_available():
        vllm_cpu_fp8.prepare()
        num_positions = options.max_running * options.max_context
        gib = vllm_cpu.cache_gib(model, num_positions, getattr(torch, options.dtype).itemsize)
        os.environ.update(vllm_cpu.ENVIRONMENT | {"VLLM_CPU_KVCACHE_SPACE": str(gib)})
        own |= vllm_cpu.ARGUMENTS | vllm_cpu.model_arguments(model, own.get("speculative_config")) | vllm_cpu.node_arguments(options.layout)
        own["max_num_batched_tokens"] = max(own["max_num_batched_tokens"], options.max_context)
    return own


def process_number(parallel: Any) -> int:
    """Number of this process among those that hold parts of the model. `parallel` is vLLM's ParallelConfig."""
    return parallel.data_parallel_index * parallel.world_size + parallel.rank


def specs_of(config: Any, dtype: torch.dtype) -> dict[str, TensorSpec]:
    """Tensors that a push must bring. `config` is vLLM's VllmConfig; `dtype`: of those that do not come in FP8."""
    model = config.model_config
    return checkpoint_specs(Path(model.model), dtype, fp8=model.quantization == "fp8", with_mtp=drafts_come(config))


def drafts_come(config: Any) -> bool:
    """Pushes bring the drafting layer: it was made without the checkpoint's (vllm_launch.py)."""
    return config.speculative_config is not None and config.speculative_config.draft_load_config.load_format == "dummy"


def needs_of(parallel: Any, names: Iterable[str]) -> Needs:
    """Needs of all these processes, from the `names` of the model's tensors; at least of those up to this one."""
    # In a replica of a dense model vLLM sets data_parallel_size to 1: nothing there depends on the others.
    size = max(parallel.data_parallel_size, parallel.data_parallel_index + 1) * parallel.world_size
    return needs_of_processes(names, num_processes=size, expert_parallel=size if parallel.enable_expert_parallel else 1)


def _parser() -> argparse.ArgumentParser:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(QuietParser, FlexibleArgumentParser):
        pass

    parser = Parser(add_help=False, allow_abbrev=False)
    AsyncEngineArgs.add_cli_args(parser)
    return parser


_TAGS: Mapping[MemoryPart, str] = {"weights": "weights", "cache": "kv_cache"}
"""vLLM's names of memory (vllm/v1/worker/gpu_worker.py)."""


class CacheLoads:
    """Pressure on the caches of vLLM's engines, of which there is one for each data-parallel group: they send it with their outputs, and
    compute it only for whom they are given as `stat_loggers`."""

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


class VLLMCore:
    """Implements Core. vLLM's own pause is asked for in mode keep only."""

    def __init__(self, engine: Any, needs: Needs, loads: CacheLoads, *, sleeps: bool, sockets: TemporaryDirectory[str] | None = None):
        """`sockets`: removed when it is closed."""
        self._sockets = sockets
        self._engine, self._needs, self._loads, self._sleeps = engine, needs, loads, sleeps
        self._session_is_open = self._is_closing = False
        self._added: dict[str, asyncio.Future[None]] = {}
        """Requests in flight; done when vLLM knows them."""

    def watch(self) -> None:
        """From now on this server ends soon after a process of vLLM's has: vLLM tells nobody, and answers no call that it had begun."""
        if self._is_closing:
            return
        if self._engine.errored:
            _give_up(self._engine.dead_error)
        # Of the processes of data-parallel groups vLLM watches only the engines (CoreEngineProcManager.monitor_engine_liveness).
        coordinator = self._engine.engine_core.resources.coordinator
        if coordinator is not None and not coordinator.proc.is_alive():
            _give_up(RuntimeError(f"the coordinator of data-parallel groups ended with exit code {coordinator.proc.exitcode}"))
        asyncio.get_running_loop().call_later(_WATCH_SECONDS, self.watch)

    async def generate(self, key: str, prompt_ids: list[int], sampling: SamplingParams, salt: str) -> Completion:
        from vllm.v1.engine.exceptions import EngineDeadError

        added = self._added[key] = asyncio.get_running_loop().create_future()
        try:
            prompt = {"prompt_token_ids": prompt_ids, "cache_salt": salt}
            outputs = await self._add(key, prompt, _sampling(sampling))
            added.set_result(None)
            try:
                while not (output := outputs.get_nowait() or await outputs.get()).finished:
                    pass
            finally:
                outputs.close()
            return _completion(key, output.outputs[0])
        except ValueError as error:
            raise EngineError(f"vLLM refuses the request: {error}") from error
        except EngineDeadError as error:
            _give_up(error)
        finally:
            del self._added[key]
            added.cancel()

    async def _add(self, key: str, prompt: Mapping[str, Any], sampling: Any) -> Any:
        try:
            return await self._engine.add_request(key, prompt, sampling)
        except Exception as error:
            if type(error) is not Exception:  # what another of its processes raises has no class of its own
                raise
            _give_up(error)

    async def abort(self, key: str) -> None:
        if key in self._added:
            await asyncio.wait([self._added[key]])  # vLLM ignores names it does not know yet
            await self._engine.abort(key)

    def load(self) -> ServerLoad:
        return self._loads.load

    async def hold(self) -> None:
        await self._engine.pause_generation(mode="keep", clear_cache=False)

    async def release(self) -> None:
        await self._engine.resume_generation()

    async def sleep(self, parts: tuple[MemoryPart, ...]) -> int:
        """0 in any case: vLLM does not say how many bytes. Without sleep mode, which needs a GPU, only weights leave."""
        if "weights" in parts:
            await self._done(self._engine.collective_rpc("before_sleep", args=(drafts_come(self._engine.vllm_config),)))
            if self._sleeps:
                await self._engine.sleep(level=2)  # of weights and cache: without copies
        elif self._sleeps:
            await self._engine.pause_generation(mode="abort")  # to its end, which the hold of ServerState does not wait for
            await self._engine.release_kv_cache_memory()
        return 0

    async def wake(self, parts: tuple[MemoryPart, ...]) -> int:
        if self._sleeps:
            await self._engine.wake_up(tags=[_TAGS[part] for part in parts])
        if "weights" in parts:
            await self._done(self._engine.collective_rpc("after_sleep"))
        return 0

    async def needs(self) -> Needs:
        return self._needs

    async def connect(self, offer: TransportOffer) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        request = WeightTransferInitRequest(init_info={"offer": wire.OFFER.dump_json(offer).decode()})
        if drafts_come(self._engine.vllm_config):
            await self._done(self._engine.collective_rpc("receive_drafts"))
        await self._checked(self._engine.init_weight_transfer_engine(request))

    async def begin(self, manifest: Manifest) -> None:
        if not self._session_is_open:
            await self._done(self._engine.start_weight_update())
            self._session_is_open = True
        await self._update("begin", wire.MANIFEST.dump_json(manifest))

    async def install(self) -> None:
        await self._update("install", b"")

    async def finish(self, version: int) -> None:
        await self._update("finish", str(version).encode())
        await self._done(self._engine.finish_weight_update(weight_version=str(version)))
        self._session_is_open = False

    def close(self) -> None:
        self._is_closing = True  # its processes end now
        self._engine.shutdown()
        if self._sockets is not None:
            self._sockets.cleanup()

    async def _update(self, step: str, body: bytes) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._checked(self._engine.update_weights(WeightTransferUpdateRequest(update_info={"step": step, "body": body.decode()})))

    async def _checked(self, step: Awaitable[None]) -> None:
        await self._done(step)
        try:
            await self._engine.collective_rpc("check_push")
        except Exception as error:  # whatever a worker raises comes as an Exception with its text
            _, failed, reason = str(error).partition(FAILED)
            if not failed:
                _give_up(error)
            raise WeightError(reason) from error

    async def _done(self, order: Awaitable[None]) -> None:
        """Workers refuse a push in `check_push` only."""
        try:
            await order
        except Exception as error:
            _give_up(error)


def _give_up(error: Exception) -> NoReturn:
    """A server whose processes ended, or no longer agree on what they were told, must be started anew."""
    logger.error("vLLM's processes failed, and this server with them", exc_info=error)
    os._exit(1)


def _completion(key: str, output: Any) -> Completion:
    token_ids = tuple(output.token_ids)
    logprobs = tuple(entry[token].logprob for entry, token in zip(output.logprobs or (), token_ids, strict=True))
    return Completion(
        request_id=key,
        token_ids=token_ids,
        logprobs=logprobs,
        spans=version_spans((span.version, span.start, span.end) for span in output.weight_versions or ()),
        finish_reason=output.finish_reason,
        drafts=_drafts(output.spec_decode_metrics),
    )


def _drafts(counted: Any) -> DraftCounts:
    """`counted`: vLLM's RequestSpecDecodeMetrics, or None. Its histogram has the passes by the number of drafts they accepted."""
    by_accepted = [] if counted is None else counted.histogram
    return DraftCounts(sum(by_accepted), sum(accepted * passes for accepted, passes in enumerate(by_accepted)))


def _sampling(sampling: SamplingParams) -> Any:
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as Native

    return Native(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_token_ids=list(sampling.stop_token_ids),
        seed=engine_seed(sampling.seed),
        extra_args={"num_drawn": sampling.num_drawn} if sampling.num_drawn else None,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
