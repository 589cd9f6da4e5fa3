"""What a step's samples cost the driver on their way from the servers to the train ranks, in three ways, side by side.

    python benchmarks/data_plane.py --samples 8192 --tokens 4096 --layers 4 --top-k 4

objects: what moerl did first, kept here for comparison: the driver parses JSON into tuples of Python numbers, lays out the batch of the
whole step, and every rank fetches all of it. puts: the driver receives the bytes and puts each sample into Ray's object store at once.
collectors: Ray actors receive and put; the driver holds references. Each way runs in a process of its own with HTTP servers (two processes
that answer with canned tokens), the real pool, runner, buffer and batch, and Ray actors that pack the micro-batches of their share as train
ranks do.

growth: resident memory of the driver at the end of the step, above that before the first request; peak: the most, sampled every 10 ms.
shared: pages of the object store that the driver touched, which every process counts; private: without these. CPU: of the driver, per
sample. received: megabytes in the store for each CPU second of the collectors, their imports left out; sent: for each of the servers.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
from canned_servers import ID, SECRET, Connected, canned_servers
from driver_memory import Memory
from pydantic import TypeAdapter

from moerl.algorithms.algorithm import build_algorithm
from moerl.config.algorithm_settings import algorithm
from moerl.config.schema.data_config import RewardConfig, RewardTerm, TinyData
from moerl.config.schema.model_config import ModelConfig, ScratchModel
from moerl.config.schema.rollout_config import RolloutConfig
from moerl.config.schema.run_config import RunConfig
from moerl.config.schema.train_config import OptimizerConfig, TrainConfig
from moerl.rollout.buffer import GroupBuffer
from moerl.rollout.fleet.collector import Collector, Intake, LocalCollector
from moerl.rollout.fleet.ray_collectors import RayCollectors
from moerl.rollout.fleet.rollout_pool import RolloutPool
from moerl.rollout.group_runner import GroupRunner
from moerl.rollout.server import wire
from moerl.rollout.server.messages import Frames, dump_requests
from moerl.train.batching.build_batch import build_batch
from moerl.train.batching.micro_batch_plan import MicroBatchPlanner
from moerl.train.batching.packed_sequences import pack
from moerl.train.batching.rank_share import Share, shares
from moerl.types.batch import TrainBatch, no_routes
from moerl.types.completion import Completion, FinishReason, SamplingParams, VersionSpan
from moerl.types.groups import Prompt, Score
from moerl.types.routes import RouteShape
from moerl.types.stored import keep

VOCAB, NUM_EXPERTS, WAYS = 150_000, 128, ("objects", "puts", "collectors")
COLLECTOR, SERVER = "CollectorActor", "spawn_main"


# -- servers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class JSONHead:
    """A completion but for its routes, as JSON: the wire of the first way."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    routes_shape: tuple[int, int, int]


JSON_HEAD = TypeAdapter(JSONHead)


def canned(arguments: argparse.Namespace) -> Completion:
    rng = np.random.default_rng(0)
    shape = (arguments.prompt + arguments.tokens - 1, arguments.layers, arguments.top_k)
    # Any order of different experts.
    routes = np.argsort(rng.random((*shape[:2], NUM_EXPERTS), dtype=np.float32), axis=-1)[..., : arguments.top_k].astype(np.uint8)
    return Completion(
        request_id=ID,
        token_ids=tuple(rng.integers(1000, VOCAB, arguments.tokens).tolist()),
        logprobs=tuple((-rng.exponential(0.5, arguments.tokens)).astype(np.float32).tolist()),
        spans=(VersionSpan(version=1, num_tokens=arguments.tokens),),
        finish_reason="length",
        routes=routes,
    )


def content_of(arguments: argparse.Namespace) -> bytes:
    completion = canned(arguments)
    if arguments.way != "objects":
        return wire.dump_completion(completion)
    assert completion.routes is not None
    known = dict(token_ids=completion.token_ids, logprobs=completion.logprobs, spans=completion.spans, finish_reason="length")
    head = JSON_HEAD.dump_json(JSONHead(request_id=ID, **known, routes_shape=completion.routes.shape))  # type: ignore[arg-type]
    return head + b"\n" + completion.routes.tobytes()


class Pieces:
    """A tokenizer with four letters for every token."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(f"{token % 10_000:04d}" for token in token_ids)


class Scorer:
    """Of RewardPool only that it answers: 0 or 1, by the length of the id's hash."""

    async def score(self, prompt: Prompt, text: str) -> Score:
        return Score(reward=float(np.random.default_rng(prompt.index).integers(2)))


# -- ranks -------------------------------------------------------------------------------------------------------


class Rank:
    """Packs every micro-batch of its share, one at a time."""

    def run(self, batch: Any, planner: MicroBatchPlanner, rank: int) -> int:
        share = Share.of(batch, planner.plan(batch.lengths)[rank])
        return sum(pack(share.batch, members, 1).num_positions for members in share.bins)

    def run_objects(self, batch: TrainBatch, planner: MicroBatchPlanner, rank: int) -> int:
        return sum(pack(batch, members, 1).num_positions for members in planner.plan(batch.lengths)[rank])

    def rss(self) -> int:
        return psutil.Process().memory_info().rss


# -- the first way -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectSample:
    completion: Completion
    text: str
    score: Score


async def generate_objects(engine: Connected, prompt: Prompt, request_id: str, arguments: argparse.Namespace) -> ObjectSample:
    body = wire.GenerateRequest(
        request_id=request_id, prompt_ids=prompt.token_ids, sampling=SamplingParams(max_tokens=arguments.tokens, seed=1)
    )
    content = await engine.call("POST", "/generate", dump_requests([body]), max_answer=2**30)
    ((_, _, answer),) = Frames([2**30]).feed(content)
    text, _, tail = answer.partition(b"\n")
    head = JSON_HEAD.validate_json(text)
    completion = Completion(
        request_id=request_id,
        token_ids=head.token_ids,
        logprobs=head.logprobs,
        spans=head.spans,
        finish_reason=head.finish_reason,
        routes=np.frombuffer(tail, dtype=np.uint8).reshape(head.routes_shape),
    )
    decoded = Pieces().decode(list(completion.token_ids), skip_special_tokens=True)
    return ObjectSample(completion=completion, text=decoded, score=await Scorer().score(prompt, decoded))


def lay_out(groups: list[tuple[Prompt, list[ObjectSample]]], shape: RouteShape) -> TrainBatch:
    samples = [(prompt, sample) for prompt, group in groups for sample in group]
    lengths = [len(prompt.token_ids) + len(sample.completion.token_ids) for prompt, sample in samples]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    total = int(offsets[-1])
    batch = TrainBatch(
        token_ids_T=np.zeros(total, dtype=np.int64),
        response_mask_T=np.zeros(total, dtype=bool),
        rollout_logprobs_T=np.zeros(total, dtype=np.float32),
        advantages_T=np.zeros(total, dtype=np.float32),
        offsets=offsets,
        routes_T=no_routes(total, shape),
    )
    for (prompt, sample), (start, end) in zip(samples, pairwise(offsets), strict=True):
        response = slice(start + len(prompt.token_ids), end)
        batch.token_ids_T[start : response.start] = prompt.token_ids
        batch.token_ids_T[response] = sample.completion.token_ids
        batch.response_mask_T[response] = True
        batch.rollout_logprobs_T[response] = sample.completion.logprobs
        assert batch.routes_T is not None and sample.completion.routes is not None
        batch.routes_T[start : end - 1] = sample.completion.routes
    return batch


# -- a step ------------------------------------------------------------------------------------------------------


def run_config(arguments: argparse.Namespace) -> RunConfig:
    return RunConfig(
        name="data-plane",
        num_steps=1,
        groups_per_step=arguments.samples // arguments.group,
        group_size=arguments.group,
        model=ModelConfig(scratch=ScratchModel(num_layers=arguments.layers), max_context=arguments.prompt + arguments.tokens),
        data=TinyData(task="repeat"),
        reward=RewardConfig(terms={"exact": RewardTerm(kind="exact")}),
        algorithm=algorithm("grpo"),
        train=TrainConfig(optimizer=OptimizerConfig(lr=1e-3), router_replay="rollout"),
        rollout=RolloutConfig(max_response_tokens=arguments.tokens),
    )


def prompt_at(index: int, arguments: argparse.Namespace) -> Prompt:
    token_ids = tuple(range(1000 + index, 1000 + index + arguments.prompt))
    return Prompt(index=index, token_ids=token_ids, text="", data_source="canned", ground_truth="")


async def by_reference(pool: RolloutPool, config: RunConfig, arguments: argparse.Namespace, shape: RouteShape) -> tuple[Any, Any]:
    """The groups, and a batch for each rank."""
    runner = GroupRunner(config, pool=pool, rewards=Scorer(), stop_token_ids=())  # type: ignore[arg-type]
    buffer = GroupBuffer(groups_per_step=config.groups_per_step, max_staleness=0, max_attempts=1)

    async def produce() -> None:
        ticket = await buffer.reserve()
        buffer.fill(ticket, await runner.run(prompt_at(ticket, arguments)))

    await asyncio.gather(*(produce() for _ in range(config.groups_per_step)))
    groups = await buffer.take(config.groups_per_step)
    batch = build_batch(groups, build_algorithm(config.algorithm, arguments.tokens), shape)
    return groups, [ray.put(part) for part in shares(batch, planner(arguments), 1)]


async def by_value(engines: list[Connected], config: RunConfig, arguments: argparse.Namespace, shape: RouteShape) -> tuple[Any, Any]:
    free = asyncio.Semaphore(arguments.in_flight)

    async def sample(prompt: Prompt, index: int) -> ObjectSample:
        async with free:
            return await generate_objects(engines[index % 2], prompt, f"{prompt.index}-{index}", arguments)

    async def group(index: int) -> tuple[Prompt, list[ObjectSample]]:
        prompt = prompt_at(index, arguments)
        return prompt, await asyncio.gather(*(sample(prompt, i) for i in range(arguments.group)))

    groups = await asyncio.gather(*(group(index) for index in range(config.groups_per_step)))
    return groups, [ray.put(lay_out(groups, shape))] * arguments.ranks


def planner(arguments: argparse.Namespace) -> MicroBatchPlanner:
    longest = arguments.prompt + arguments.tokens
    return MicroBatchPlanner(
        num_ranks=arguments.ranks, token_budget=4 * longest, token_multiple=1, attention_tokens=1e4, sequence_multiple=1, count_multiple=1,
        waits_in_rounds=False,
    )  # fmt: skip


async def step(arguments: argparse.Namespace, engines: list[Connected]) -> dict[str, float]:
    config, shape = run_config(arguments), RouteShape(num_layers=arguments.layers, top_k=arguments.top_k, num_experts=NUM_EXPERTS)
    intake = Intake(vocab_size=VOCAB, decoder=Pieces(), routes=shape)
    collector: Collector = LocalCollector(intake, keep=keep)
    if arguments.way == "collectors":
        collector = RayCollectors(
            intake, secret=SECRET, num_actors=arguments.collectors, start_seconds=60, per_server=-(-arguments.collectors // 2)
        )
    half = arguments.in_flight // 2
    pool = RolloutPool(engines, max_running=half, max_queued=0, collector=collector, request_seconds=1e6, probe_seconds=1e6)
    ranks = [ray.remote(num_cpus=0)(Rank).remote() for _ in range(arguments.ranks)]
    await asyncio.gather(*(rank.rss.remote() for rank in ranks))
    await pool.start()
    pool.fleet.served(pool.fleet.members)
    memory, began, cpu, received, sent_by = Memory(), time.perf_counter(), time.process_time(), seconds_of(COLLECTOR), seconds_of(SERVER)
    if arguments.way == "objects":
        groups, batches = await by_value(engines, config, arguments, shape)
        calls = [rank.run_objects.remote(batches[i], planner(arguments), i) for i, rank in enumerate(ranks)]
    else:
        groups, batches = await by_reference(pool, config, arguments, shape)
        calls = [rank.run.remote(batches[i], planner(arguments), i) for i, rank in enumerate(ranks)]
    sent, received, sent_by = time.perf_counter(), seconds_of(COLLECTOR) - received, seconds_of(SERVER) - sent_by
    packed = sum([await call for call in calls])
    assert packed == arguments.samples * (arguments.prompt + arguments.tokens) and len(groups) == config.groups_per_step
    ended, cpu = time.perf_counter(), time.process_time() - cpu
    private, shared = memory.growth()
    memory.end()
    in_store = stored_bytes()
    await pool.close()
    return {
        "private": private, "shared": shared, "peak_private": memory.peak[0], "peak_shared": memory.peak[1], "in_store": in_store,
        "received": in_store / received if received else 0.0, "sent": in_store / sent_by if sent_by else 0.0,
        "rollout": sent - began, "ranks": ended - sent, "cpu": cpu / arguments.samples,
    }  # fmt: skip


def seconds_of(word: str) -> float:
    """CPU seconds of the processes below this one whose command has it."""
    times = [each.cpu_times() for each in psutil.Process().children(recursive=True) if any(word in part for part in each.cmdline())]
    return sum(each.user + each.system for each in times)


def stored_bytes() -> int:
    from ray._private.internal_api import get_state_from_address, node_stats

    gcs = get_state_from_address(ray.get_runtime_context().gcs_address)
    node = gcs.node_table()[0]
    return int(node_stats(node["NodeManagerAddress"], node["NodeManagerPort"]).store_stats.object_store_bytes_used)


def measure(arguments: argparse.Namespace) -> None:
    """One way, as a line of JSON."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    store = int(arguments.samples * (arguments.prompt + arguments.tokens) * (24 + 2 * arguments.layers * arguments.top_k)) + 2**28
    ray.init("local", include_dashboard=False, log_to_driver=False, logging_level="ERROR", object_store_memory=store)
    try:
        with canned_servers(content_of(arguments), num_running=arguments.in_flight) as engines:
            print(json.dumps(asyncio.run(step(arguments, engines))))
    finally:
        ray.shutdown()


def megabytes(*numbers: float) -> str:
    return "  ".join(f"{number / 1e6:12,.0f}" for number in numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=4096, help="of a response")
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4, help="with experts")
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2, help="data-parallel")
    parser.add_argument("--collectors", type=int, default=1)
    parser.add_argument("--in-flight", type=int, default=64, help="requests at a time")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way is not None:
        measure(arguments)
        return
    size = f"{arguments.layers} layers, top {arguments.top_k}"
    print(f"{arguments.samples} samples of {arguments.prompt} + {arguments.tokens} tokens, routes of {size}; {arguments.ranks} ranks; MB")
    print(
        "way          growth: private        shared  peak: private        shared         store  rollout s  ranks s  CPU ms received  sent"
    )
    for way in arguments.ways:
        command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--way", way]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        columns = megabytes(*(found[name] for name in ("private", "shared", "peak_private", "peak_shared", "in_store")))
        received, sent = (found[name] / 1e6 for name in ("received", "sent"))
        print(
            f"{way:12} {columns}  {found['rollout']:9.1f}  {found['ranks']:7.1f}  {found['cpu'] * 1e3:6.2f} {received:8.0f}{sent:6.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
