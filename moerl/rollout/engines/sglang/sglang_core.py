"""SGLang in this process and its children, as a Core."""

import argparse
import asyncio
import base64
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from moerl.cluster.sockets import free_ports
from moerl.config.derive.model_shape import read_config, shape_of_config
from moerl.config.schema.rollout_config import NUM_PORTS
from moerl.rollout.engines.argument_check import QuietParser, argument_problems, version_problems
from moerl.rollout.engines.engine_arguments import Options, as_command_line
from moerl.rollout.engines.sglang import sglang_cpu, sglang_launch, sglang_scheduler
from moerl.rollout.server import wire
from moerl.rollout.server.contract import MemoryPart, engine_seed, version_spans
from moerl.types.completion import Completion, DraftCounts, SamplingParams, ServerLoad
from moerl.types.errors import EngineError, Problem, WeightError
from moerl.types.kept_vocabulary import KeptVocabulary
from moerl.types.push import Manifest, Needs, TransportOffer
from moerl.types.routes import RouteShape

OWN_ARGUMENTS = {argument: setting for setting, argument in sglang_launch.NAMES.items()} | {
    "load_format": "leave it out: weights come by a push",
    "host": "rollout.host",
    "port": "rollout.port",
    "skip_tokenizer_init": "leave it out: tokens in, tokens out",
    "sampling_backend": "leave it out: only pytorch samples with a seed per request",
    **dict.fromkeys(("custom_weight_loader", "weight_version"), "leave it out: pushes bring weights, with their version"),
    "sampling_mask_max_tokens": "leave it out: rollout.top_k may be as large as SGLang has it",
    "dp_size": "rollout.num_servers, or rollout.layout.dp for data-parallel attention",
    "enable_dp_attention": "rollout.layout.dp",
    "deepep_mode": "rollout.layout.all_to_all",
    "enable_eplb": "rollout.layout.redundant_experts",
    "speculative_algorithm": "rollout.layout.mtp_tokens",
    "speculative_draft_load_format": "leave it out: train.mtp_loss decides whether pushes bring the drafting layer",
    **dict.fromkeys(("speculative_accept_threshold_single", "speculative_accept_threshold_acc"), "leave it out: drafts are exact"),
    "node_rank": "leave it out: moerl numbers the nodes of a server",
    "pp_size": "leave it out, or a larger rollout.layout.gpus",
    "moe_dp_size": "leave it out: rollout.layout.ep says which GPUs hold an expert",
    "init_expert_location": "leave it out: a push brings experts in SGLang's own order",
    "disable_shared_experts_fusion": "leave it out: pushes bring a shared expert by itself",
    "enable_weights_cpu_backup": "leave it out: a push brings weights before a server that was asleep serves",
    **dict.fromkeys(("enable_memory_saver", "enable_draft_weights_cpu_backup"), "placement.mode=colocated"),
    **dict.fromkeys(("enable_nvidia_megakernel", "enable_paged_experts", "weight_cache_mode"), "leave it out: pushes bring new weights"),
}
"""Arguments that moerl sets or relies on, and what to write instead."""

_TURN_SECONDS = 0.002


def find_problems(arguments: Mapping[str, Any], model: Mapping[str, Any] | None) -> list[Problem]:
    if wrong := version_problems("sglang", ["sglang"], sglang_launch.SUPPORTED):
        return wrong
    return argument_problems(_parser(), arguments, own=OWN_ARGUMENTS, engine="SGLang")


def start(options: Options) -> "SGLangCore":
    # On one node SGLang meets at ports that are the same for every server with data-parallel attention if it is not told others.
    meets = {"dist_init_addr": f"127.0.0.1:{free_ports(NUM_PORTS)}"} if options.layout.dp > 1 and options.layout.nodes == 1 else {}
    engine = _engine(options, meets)
    routes = shape_of_config(read_config(options.model)).routes if options.returns_routes else None
    core = SGLangCore(engine, routes, num_groups=options.layout.dp)
    if engine.tokenizer_manager.max_req_input_len < (most := options.max_context):  # it would end longer requests as if they were complete
        core.close()
        raise EngineError(f"model.max_context = {most}: no room in SGLang's cache; lower it, or raise rollout.layout.memory_fraction")
    return core


def follow(options: Options) -> None:
    """The part of a node after the first; SGLang's own constructor returns when the server has ended."""
    # SGLang answers questions after its health here, on a port that is the same everywhere if it is not told one.
    _engine(options, {"host": "127.0.0.1", "port": free_ports(1)})


def _engine(options: Options, more: Mapping[str, Any] = MappingProxyType({})) -> Any:
    os.environ.update(sglang_launch.environment(options))
    if not options.shares_gpus:  # one that shares them is in no group with the trainer's ranks
        os.environ.setdefault(*sglang_launch.NCCL_MEMORY)
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ServerArgs

    class OurEngine(Engine):
        run_scheduler_process_func = staticmethod(sglang_scheduler.run_scheduler)

    parser = _parser()
    line = as_command_line(_own_arguments(options) | dict(options.engine_args) | dict(more), parser)
    return OurEngine(server_args=ServerArgs.from_cli_args(parser.parse_args(line)))


def _own_arguments(options: Options) -> dict[str, Any]:
    has_gpu = torch.cuda.is_available()
    own = sglang_launch.arguments(replace(options, shares_gpus=options.shares_gpus and has_gpu), read_config(options.model))
    own["disable_shared_experts_fusion"] = True
    if has_gpu:
        return own
    os.environ.update(sglang_cpu.environment(options.layout))
    return sglang_cpu.ARGUMENTS | {"max_total_tokens": options.max_running * sglang_launch.positions_of_request(options)} | own


def _parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = QuietParser(add_help=False, allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    return parser


_TAGS: Mapping[MemoryPart, tuple[str, ...]] = {"weights": ("weights",), "cache": ("kv_cache", "cuda_graph")}
"""SGLang's names of memory (sglang/srt/constants.py)."""


def file_of_loads(reader: Any) -> Path:
    """In /dev/shm. Over several nodes with data-parallel attention the reader is another, which keeps the name to itself."""
    return Path(reader.path if hasattr(reader, "path") else reader._shm_path)


class SGLangCore:
    """Implements Core. SGLang's own pause is asked for in mode in_place only."""

    def __init__(self, engine: Any, routes: RouteShape | None, *, num_groups: int):
        """`routes` None: it was started without routed experts. `num_groups`: of data-parallel attention."""
        self._engine, self._manager, self._routes = engine, engine.tokenizer_manager, routes
        self._num_groups = num_groups
        self._num_layers: int = read_config(Path(engine.server_args.model_path))["num_hidden_layers"]
        self._session_is_open = False
        self._needs = sglang_scheduler.needs_of(engine.server_args, sglang_scheduler.specs_of(engine.server_args, torch.float32))
        self._in_flight: set[str] = set()
        self._num_preempted = 0
        self._manager.auto_create_handle_loop()  # it takes SIGTERM too, which our server takes back as it starts
        self._unlink_loads()

    async def generate(self, key: str, prompt_ids: list[int], sampling: SamplingParams, salt: str) -> Completion:
        from sglang.srt.managers.io_struct import GenerateReqInput

        self._in_flight.add(key)
        try:
            # As the engine's own async_generate, which knows nothing of sampling masks.
            request = GenerateReqInput(
                input_ids=prompt_ids,
                sampling_params=_sampling(sampling),
                return_logprob=True,
                logprob_start_len=-1,
                return_routed_experts=sampling.returns_routes,
                return_sampling_mask=sampling.filtered,
                rid=key,
                cache_salt=salt,
            )
            answer = await anext(self._manager.generate_request(request, None))
        except ValueError as error:
            raise EngineError(f"SGLang refuses the request: {error}") from error
        finally:
            self._in_flight.remove(key)
        self._num_preempted += answer["meta_info"].get("num_retractions", 0)  # one that was aborted in SGLang's queue has no number
        return self._completion(key, answer, sampling)

    async def abort(self, key: str) -> None:
        # SGLang ignores names it does not know yet, and has no event for when it does.
        while key in self._in_flight and key not in self._manager.rid_to_state:  # noqa: ASYNC110
            await asyncio.sleep(_TURN_SECONDS)
        self._manager.abort_request(rid=key)

    def load(self) -> ServerLoad:
        """Cache as its schedulers wrote it into shared memory, at the newest prefill or up to 15 tokens ago; what it calls retracted, of
        requests that have ended."""
        shares = [load.token_usage for load in self._manager.load_snapshot_reader.read_all()]
        return ServerLoad(cache_share=min(max(shares, default=0.0), 1.0), num_preempted=self._num_preempted)

    async def hold(self) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        await self._manager.pause_generation(PauseGenerationReqInput(mode="in_place"))

    async def release(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        await self._manager.continue_generation(ContinueGenerationReqInput())

    async def sleep(self, parts: tuple[MemoryPart, ...]) -> int:
        if "weights" in parts:
            await self._call("sleep", b"")
        return await self._occupation("release", parts)

    async def wake(self, parts: tuple[MemoryPart, ...]) -> int:
        num_bytes = await self._occupation("resume", parts)
        if "weights" in parts:
            await self._call("wake", b"")
        return num_bytes

    async def needs(self) -> Needs:
        return self._needs

    async def connect(self, offer: TransportOffer) -> None:
        await self._call("connect", wire.OFFER.dump_json(offer))

    async def begin(self, manifest: Manifest) -> None:
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        if not self._session_is_open:
            self._session_is_open = True
            await self._session("begin_weight_update", BeginWeightUpdateReqInput())
        await self._call("begin", wire.MANIFEST.dump_json(manifest))

    async def install(self) -> None:
        await self._call("install", b"")

    async def finish(self, version: int) -> None:
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput, UpdateWeightVersionReqInput

        await self._call("finish", str(version).encode())
        await self._session("end_weight_update", EndWeightUpdateReqInput())
        self._session_is_open = False
        await self._manager.update_weight_version(UpdateWeightVersionReqInput(new_version=str(version), abort_all_requests=False))

    def close(self) -> None:
        self._engine.shutdown()
        file_of_loads(self._manager.load_snapshot_reader).unlink(missing_ok=True)

    def _unlink_loads(self) -> None:
        """SGLang never removes the file in /dev/shm by which its processes tell their load. With more than one group of schedulers a
        process of its own opens it at any time, and it goes when the server closes."""
        if self._num_groups == 1:
            reader = self._manager.load_snapshot_reader
            reader.read_all()  # opens it
            file_of_loads(reader).unlink(missing_ok=True)

    async def _call(self, step: str, body: bytes) -> None:
        """Call on every scheduler. SGLang's collective_rpc reaches only one group with data-parallel attention and waits on the event loop:
        this goes the way of its other orders, and the first scheduler of each group answers."""
        from sglang.srt.managers.io_struct import RpcReqInput, sock_recv

        order = RpcReqInput(method=sglang_scheduler.INSTALL_METHOD, parameters={"step": step, "body": body.decode()})
        await self._manager._async_dispatch_to_scheduler(order)
        # One thread for all of them: a call that is cancelled must not leave answers for the next one.
        for answer in await asyncio.to_thread(lambda: [sock_recv(self._engine.send_to_rpc) for _ in range(self._num_groups)]):
            if not answer.success:
                raise WeightError(answer.message)

    async def _session(self, name: str, body: Any) -> None:
        success, message = await getattr(self._manager, name)(body, None)
        if not success:
            raise WeightError(f"SGLang's {name}: {message}")

    async def _occupation(self, action: str, parts: tuple[MemoryPart, ...]) -> int:
        """Bytes of memory; 0 where SGLang runs without its memory saver, which needs a GPU."""
        from sglang.srt.managers import io_struct

        if not self._engine.server_args.enable_memory_saver:
            return 0
        body = getattr(io_struct, f"{action.capitalize()}MemoryOccupationReqInput")(tags=[tag for part in parts for tag in _TAGS[part]])
        await getattr(self._manager, f"{action}_memory_occupation")(body, None)
        return await self._bytes_of(parts)

    async def _bytes_of(self, parts: tuple[MemoryPart, ...]) -> int:
        """Bytes on all GPUs, as the first of each group of tensor-parallel ranks measured its own when it started."""
        args = self._engine.server_args
        measured = [state["memory_usage"] for state in await self._manager.get_internal_state()]
        gigabytes = sum(usage["weight" if part == "weights" else "kvcache"] for usage in measured for part in parts)
        return int(gigabytes * 2**30) * args.tp_size // len(measured)

    def _completion(self, key: str, answer: Mapping[str, Any], sampling: SamplingParams) -> Completion:
        meta = answer["meta_info"]
        reason = meta["finish_reason"]
        if reason["type"] == "abort" and reason.get("err_type"):
            raise EngineError(f"SGLang ended the request: {reason.get('message')}")
        asked = {"routed_experts": sampling.returns_routes, "output_token_sampling_mask": sampling.filtered}
        if reason["type"] == "abort" and any(is_asked and name not in meta for name, is_asked in asked.items()):
            # It was in SGLang's queue. If SGLang had taken it back before, some of its tokens came without these: it begins anew.
            return Completion(request_id=key, token_ids=(), logprobs=(), spans=(), finish_reason="abort")
        token_ids, sets = tuple(answer["output_ids"]), None
        logprobs = tuple(float(entry[0]) for entry in meta.get("output_token_logprobs") or ())
        if sampling.filtered and token_ids:
            sets = _sets(meta["output_token_sampling_mask"])
            logprobs = tuple(map(float, meta["output_token_sampling_logprobs"]))
        return Completion(
            request_id=key,
            token_ids=token_ids,
            logprobs=logprobs,
            spans=version_spans((span["version"], span["start"], span["end"]) for span in meta.get("weight_versions") or ()),
            finish_reason=reason["type"],
            routes=self._routes_of(meta) if sampling.returns_routes and token_ids else None,
            sets=sets,
            drafts=DraftCounts(meta.get("spec_verify_ct", 0), meta.get("spec_num_correct_drafts", 0)),
        )

    def _routes_of(self, meta: Mapping[str, Any]) -> np.ndarray:
        assert self._routes is not None, "limits refuse the request"
        chosen = np.frombuffer(base64.b64decode(meta["routed_experts"]), dtype=np.int32)
        # SGLang reports every layer; those without experts are the first.
        by_layer = chosen.reshape(-1, self._num_layers, self._routes.top_k)[:, -self._routes.num_layers :]
        return by_layer.astype(self._routes.dtype)


def _sets(masks: Sequence[Sequence[int]]) -> KeptVocabulary:
    """Entries of each token, which SGLang has by probability."""
    ids = [np.sort(np.asarray(mask, dtype=np.int32)) for mask in masks]
    return KeptVocabulary.of_counts(np.concatenate(ids), np.array([len(each) for each in ids]))


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
