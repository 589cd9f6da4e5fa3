"""SGLang in this process and its children, as a Core."""

import argparse
import asyncio
import base64
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moerl.config.model_shape import read_config, shape_of_config
from moerl.push_types import Bucket, Manifest, Needs, TransportOffer
from moerl.rollout import wire
from moerl.rollout.engine import Part
from moerl.rollout.engines.arguments import QuietParser, argument_problems, as_command_line, version_problems
from moerl.rollout.engines.core import Sampled, engine_seed, version_spans
from moerl.rollout.engines.process import Options
from moerl.rollout.hf.model import checkpoint_specs
from moerl.rollout.sglang import cpu, scheduler
from moerl.types import EngineError, Problem, RouteShape, SamplingParams, WeightError

logger = logging.getLogger(__name__)

SUPPORTED = ">=0.5.23,<0.6"

OWN_ARGUMENTS = {
    "model": "model.path or model.scratch",
    "model_path": "model.path or model.scratch",
    "load_format": "leave it out: weights come by a push",
    "dtype": "rollout.dtype",
    "context_length": "model.max_context",
    "max_running_requests": "rollout.max_running",
    "chunked_prefill_size": "rollout.prefill_chunk",
    "host": "rollout.host",
    "port": "rollout.port",
    "skip_tokenizer_init": "leave it out: tokens in, tokens out",
    "sampling_backend": "leave it out: only pytorch samples with a seed per request",
    "enable_return_routed_experts": "train.router_replay=rollout",
    "custom_weight_loader": "leave it out",
    "weight_version": "leave it out",
    "enable_memory_saver": "placement.mode=colocated",
    "enable_weights_cpu_backup": "placement.mode=colocated",
    "quantization": "leave it out: a push brings weights in rollout.dtype",
}
"""What moerl sets or relies on, and what to write instead."""

_TURN_SECONDS = 0.002

_SPARE_POSITIONS = 8
"""SGLang ends a request some tokens before its context_length."""


def find_problems(arguments: Mapping[str, Any], model: Mapping[str, Any] | None) -> list[Problem]:
    if wrong := version_problems("sglang", ["sglang"], SUPPORTED):
        return wrong
    return argument_problems(_parser(), arguments, own=OWN_ARGUMENTS, engine="SGLang")


def start(options: Options) -> "SGLangCore":
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ServerArgs

    class OurEngine(Engine):
        run_scheduler_process_func = staticmethod(scheduler.run_scheduler)

    model = read_config(options.model)
    routes = shape_of_config(model).routes if options.returns_routes else None
    parser = _parser()
    line = as_command_line(_own_arguments(options) | dict(options.engine_args), parser)
    server_args = ServerArgs.from_cli_args(parser.parse_args(line))
    return SGLangCore(OurEngine(server_args=server_args), routes)


def _own_arguments(options: Options) -> dict[str, Any]:
    own: dict[str, Any] = {
        "model_path": options.model,
        "load_format": "dummy",
        "dtype": options.dtype,
        "context_length": options.max_context + _SPARE_POSITIONS,
        "max_running_requests": options.max_running,
        "chunked_prefill_size": options.prefill_chunk,
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "sampling_backend": "pytorch",
        "enable_return_routed_experts": options.returns_routes,
    }
    if _has_gpu():
        own |= {"enable_memory_saver": options.shares_gpus, "enable_weights_cpu_backup": options.shares_gpus}
    else:
        own |= cpu.ARGUMENTS | {"max_total_tokens": options.max_running * (options.max_context + _SPARE_POSITIONS)}
    return own


def _has_gpu() -> bool:
    return torch.cuda.is_available()


def _parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = QuietParser(add_help=False, allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    return parser


_TAGS: Mapping[Part, tuple[str, ...]] = {"weights": ("weights",), "cache": ("kv_cache", "cuda_graph")}
"""SGLang's names of memory (sglang/srt/constants.py)."""


class SGLangCore:
    """Implements Core. SGLang's own pause is asked for in mode in_place only."""

    def __init__(self, engine: Any, routes: RouteShape | None):
        """`routes` None: it was started without routed experts."""
        self._engine, self._manager, self._routes = engine, engine.tokenizer_manager, routes
        self._session_is_open = False
        self._needs = scheduler.needs_of(engine.server_args, checkpoint_specs(Path(engine.server_args.model_path), torch.float32))
        self._in_flight: set[str] = set()
        self._manager.auto_create_handle_loop()  # it takes SIGTERM too, which our server takes back as it starts
        self._unlink_loads()

    async def generate(self, key: str, prompt_ids: list[int], sampling: SamplingParams, salt: str) -> Sampled:
        self._in_flight.add(key)
        try:
            answer = await self._engine.async_generate(
                input_ids=prompt_ids,
                sampling_params=_sampling(sampling),
                return_logprob=True,
                logprob_start_len=-1,
                return_routed_experts=sampling.returns_routes,
                rid=key,
                cache_salt=salt,
            )
        except ValueError as error:
            raise EngineError(f"SGLang refuses the request: {error}") from error
        finally:
            self._in_flight.remove(key)
        return self._sampled(answer, sampling)

    async def abort(self, key: str) -> None:
        # SGLang ignores names it does not know yet, and has no event for when it does.
        while key in self._in_flight and key not in self._manager.rid_to_state:  # noqa: ASYNC110
            await asyncio.sleep(_TURN_SECONDS)
        self._manager.abort_request(rid=key)

    async def hold(self) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        await self._manager.pause_generation(PauseGenerationReqInput(mode="in_place"))

    async def release(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        await self._manager.continue_generation(ContinueGenerationReqInput())

    async def sleep(self, parts: tuple[Part, ...]) -> int:
        return await self._occupation("release", parts)

    async def wake(self, parts: tuple[Part, ...]) -> int:
        return await self._occupation("resume", parts)

    def needs(self) -> Needs:
        return self._needs

    async def connect(self, offer: TransportOffer) -> None:
        await self._call("connect", wire.OFFER.dump_json(offer))

    async def begin(self, manifest: Manifest) -> None:
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        if not self._session_is_open:
            self._session_is_open = True
            await self._session("begin_weight_update", BeginWeightUpdateReqInput())
        await self._call("begin", wire.MANIFEST.dump_json(manifest))

    async def install(self, bucket: Bucket) -> None:
        await self._call("install", wire.BUCKET.dump_json(bucket))

    async def finish(self, version: int) -> None:
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput, UpdateWeightVersionReqInput

        await self._call("finish", wire.FINISH.dump_json(wire.FinishBody(version=version)))
        await self._session("end_weight_update", EndWeightUpdateReqInput())
        self._session_is_open = False
        await self._manager.update_weight_version(UpdateWeightVersionReqInput(new_version=str(version), abort_all_requests=False))

    def close(self) -> None:
        self._engine.shutdown()

    def _unlink_loads(self) -> None:
        """SGLang never removes the file in /dev/shm by which its processes tell their load. With more than one scheduler a process
        of its own opens it at any time."""
        if self._engine.server_args.dp_size == 1:
            reader = self._manager.load_snapshot_reader
            reader.read_all()  # opens it
            Path(reader.path).unlink(missing_ok=True)

    async def _call(self, step: str, body: bytes) -> None:
        """On every scheduler; in a thread, since SGLang waits for the answer without its event loop."""
        try:
            await asyncio.to_thread(self._engine.collective_rpc, scheduler.INSTALL_METHOD, step=step, body=body.decode())
        except AssertionError as error:
            raise WeightError(str(error)) from error

    async def _session(self, name: str, body: Any) -> None:
        call: Callable[[Any, Any], Awaitable[tuple[bool, str]]] = getattr(self._manager, name)
        success, message = await call(body, None)
        if not success:
            raise WeightError(f"SGLang's {name}: {message}")

    async def _occupation(self, action: str, parts: tuple[Part, ...]) -> int:
        """Bytes that move; 0 where SGLang runs without its memory saver, which needs a GPU."""
        from sglang.srt.managers import io_struct

        if not self._engine.server_args.enable_memory_saver:
            return 0
        body = getattr(io_struct, f"{action.capitalize()}MemoryOccupationReqInput")(tags=[tag for part in parts for tag in _TAGS[part]])
        await getattr(self._manager, f"{action}_memory_occupation")(body, None)
        return await self._bytes_of(parts)

    async def _bytes_of(self, parts: tuple[Part, ...]) -> int:
        """On all GPUs, as the first of each group of tensor-parallel ranks measured its own when it started."""
        args = self._engine.server_args
        measured = [state["memory_usage"] for state in await self._manager.get_internal_state()]
        gigabytes = sum(usage["weight" if part == "weights" else "kvcache"] for usage in measured for part in parts)
        return int(gigabytes * 2**30) * args.tp_size * args.pp_size // len(measured)

    def _sampled(self, answer: Mapping[str, Any], sampling: SamplingParams) -> Sampled:
        meta = answer["meta_info"]
        reason = meta["finish_reason"]
        if reason["type"] == "abort" and reason.get("err_type"):
            raise EngineError(f"SGLang ended the request: {reason.get('message')}")
        token_ids = tuple(answer["output_ids"])
        return Sampled(
            token_ids=token_ids,
            logprobs=tuple(float(entry[0]) for entry in meta.get("output_token_logprobs") or ()),
            spans=version_spans((span["version"], span["start"], span["end"]) for span in meta.get("weight_versions") or ()),
            finish_reason=reason["type"],
            routes=self._routes_of(meta) if sampling.returns_routes and token_ids else None,
        )

    def _routes_of(self, meta: Mapping[str, Any]) -> np.ndarray:
        assert self._routes is not None, "limits refuse the request"
        chosen = np.frombuffer(base64.b64decode(meta["routed_experts"]), dtype=np.int32)
        return chosen.reshape(-1, self._routes.num_layers, self._routes.top_k).astype(self._routes.dtype)


def _sampling(sampling: SamplingParams) -> dict[str, Any]:
    return {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k if sampling.top_k else -1,
        "stop_token_ids": list(sampling.stop_token_ids),
        "sampling_seed": engine_seed(sampling.seed),
        "no_stop_trim": True,
    }
