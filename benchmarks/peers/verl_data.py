"""The side of verl in benchmarks/peer_data.py: `python verl_data.py WAY`, settings as JSON on stdin, in .venv-peers, without moerl.

A step's samples on their way from agent loops (Ray actors) through the driver to train ranks (Ray actors), by verl's own functions, of
equal lengths, as benchmarks/data_plane.py has them; engines, rewards and a log-prob pass are left out.

dataproto: the trainer of trainer.use_v1=false. The driver concatenates padded tensors, balances, computes advantages, takes the padding
away and puts a part for each rank into Ray's object store.
transfer_queue: the trainer of verl 0.9 by default. Samples lie in TransferQueue's storage; the driver reads what advantages need of them.
plan: micro-batches as _balance_batch and rearrange_micro_batches choose them, for given lengths; padding does not count.
"""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import numpy as np
import ray
import torch
import transfer_queue as tq
from driver_memory import Memory
from tensordict import TensorDict
from verl import DataProto
from verl.protocol import BatchData
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.utils.ray_utils import parallel_put
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions
from verl.workers.utils.padding import left_right_2_no_padding, response_to_nested

PARTITION = "train"


def padded(task: SimpleNamespace, count: int) -> dict[str, torch.Tensor]:
    """Tensors of `count` samples, by the names and dtypes of verl's agent loop."""
    rng, total = np.random.default_rng(0), task.prompt + task.tokens
    ids = torch.from_numpy(rng.integers(1000, 150_000, (count, total)))
    mask, scores = torch.ones(count, task.tokens, dtype=torch.int64), torch.zeros(count, task.tokens)
    scores[:, -1] = torch.from_numpy(rng.integers(0, 2, count)).float()
    return {
        "prompts": ids[:, : task.prompt].clone(),
        "responses": ids[:, task.prompt :].clone(),
        "response_mask": mask,
        "input_ids": ids,
        "position_ids": torch.arange(total).repeat(count, 1),
        "rollout_log_probs": torch.from_numpy(-rng.exponential(0.5, (count, task.tokens)).astype(np.float32)),
        "routed_experts": torch.from_numpy(rng.integers(0, 128, (count, total, task.layers, task.top_k)).astype(np.uint8)),
        "rm_scores": scores,
    }


@ray.remote(num_cpus=0)
class AgentLoop:
    """Draws its part of the samples."""

    def generate(self, task: SimpleNamespace, count: int) -> DataProto:
        tensors = padded(task, count)
        tensors["attention_mask"] = torch.ones_like(tensors["input_ids"])
        return DataProto(batch=TensorDict(tensors, batch_size=count))

    def put(self, task: SimpleNamespace, first: int, count: int) -> None:
        """Each sample with a call of its own, as AgentLoopWorkerTQ does."""
        tq.init()
        fields = TensorDict(padded(task, count), batch_size=count)
        tag = {"status": "success", "seq_len": task.prompt + task.tokens}
        for index in range(count):
            key = f"{(first + index) // task.group}_{(first + index) % task.group}_0"
            tq.kv_batch_put(keys=[key], fields=fields[index : index + 1], tags=[tag], partition_id=PARTITION)


@ray.remote(num_cpus=0)
class Rank:
    """Reads its part of the samples."""

    def take(self, batch: TensorDict) -> int:
        return int(batch["input_ids"].numel())

    def fetch(self, keys: list[str]) -> int:
        tq.init()
        return int(tq.kv_batch_get(keys=keys, partition_id=PARTITION)["input_ids"].numel())


def partitions(lengths: list[int], parts: int) -> list[list[int]]:
    return get_seqlen_balanced_partitions(calculate_workload(torch.tensor(lengths)), k_partitions=parts, equal_size=True)


def by_dataproto(task: SimpleNamespace, loops: list[Any], ranks: list[Any]) -> tuple[list[Any], Any]:
    """Calls of the ranks, and what the driver holds meanwhile."""
    outputs = ray.get([loop.generate.remote(task, task.samples // len(loops)) for loop in loops])
    batch = DataProto.concat(outputs)
    del outputs
    order = partitions(batch.batch["attention_mask"].sum(-1).tolist(), len(ranks))
    batch.non_tensor_batch["uid"] = np.arange(task.samples) // task.group
    batch.reorder(torch.tensor([index for part in order for index in part]))
    scores, mask = batch.batch["rm_scores"], batch.batch["response_mask"]
    batch.batch["advantages"], batch.batch["returns"] = compute_grpo_outcome_advantage(scores, mask, batch.non_tensor_batch["uid"])
    tensors = left_right_2_no_padding(batch.to_tensordict())
    parts = parallel_put(BatchData(tensors).chunk(chunks=len(ranks)), max_workers=min(len(ranks), os.cpu_count() or 1))
    return [rank.take.remote(part) for rank, part in zip(ranks, parts, strict=True)], batch


def by_transfer_queue(task: SimpleNamespace, loops: list[Any], ranks: list[Any]) -> tuple[list[Any], Any]:
    """As by_dataproto."""
    count = task.samples // len(loops)
    ray.get([loop.put.remote(task, index * count, count) for index, loop in enumerate(loops)])
    tags = tq.kv_list(partition_id=PARTITION)[PARTITION]
    keys = list(tags)
    order = partitions([tags[key]["seq_len"] for key in keys], len(ranks))
    needed = ["response_mask", "rm_scores", "rollout_log_probs"]
    data = tq.kv_batch_get(keys=keys, partition_id=PARTITION, select_fields=needed)
    mask, dense = data["response_mask"], data.to_padded_tensor()
    groups = np.array([key.partition("_")[0] for key in keys], dtype=object)
    found = compute_grpo_outcome_advantage(dense["rm_scores"], dense["response_mask"], groups)
    columns = {"advantages": found[0], "returns": found[1]}
    if mask.is_nested:  # not where all lengths are equal
        columns = {name: response_to_nested(column, mask) for name, column in columns.items()}
    batch = tq.kv_batch_put(keys=keys, partition_id=PARTITION, fields=TensorDict(columns, batch_size=len(keys)))
    return [rank.fetch.remote([keys[index] for index in part]) for rank, part in zip(ranks, order, strict=True)], batch


def step(task: SimpleNamespace, way: str) -> dict[str, float]:
    """Bytes and CPU seconds of the driver, above those with everything started."""
    loops, ranks = [AgentLoop.remote() for _ in range(task.loops)], [Rank.remote() for _ in range(task.ranks)]
    ray.get([actor.__ray_ready__.remote() for actor in (*loops, *ranks)])
    if way == "transfer_queue":
        tq.init()
    memory, began, cpu = Memory(), time.perf_counter(), time.process_time()
    calls, batch = (by_transfer_queue if way == "transfer_queue" else by_dataproto)(task, loops, ranks)
    assert sum(ray.get(calls)) == task.samples * (task.prompt + task.tokens) and batch is not None
    ended, cpu = time.perf_counter(), time.process_time() - cpu
    private, shared = memory.growth()
    memory.end()
    return {
        "private": private, "shared": shared, "peak_private": memory.peak[0], "peak_shared": memory.peak[1],
        "seconds": ended - began, "cpu": cpu / task.samples,
    }  # fmt: skip


def plan(task: SimpleNamespace) -> dict[str, Any]:
    """Micro-batches of every rank, as many for each, and CPU seconds of the driver and of a rank, of which each plans its own."""
    began, lengths = time.process_time(), np.array(task.lengths)
    parts = partitions(task.lengths, task.ranks)
    balanced = time.process_time()
    count = max(-(-int(lengths[part].sum()) // task.budget) for part in parts)
    while True:  # as rearrange_micro_batches: one more until all are within the budget
        bins = [[[part[index] for index in members] for members in micro_batches(lengths[part], count)] for part in parts]
        if all(lengths[members].sum() <= task.budget for rank in bins for members in rank):
            return {"plan": bins, "cpu": balanced - began, "rank_cpu": (time.process_time() - balanced) / task.ranks}
        count += 1


def micro_batches(lengths: np.ndarray, count: int) -> list[list[int]]:
    """Costliest first."""
    work = calculate_workload(torch.from_numpy(lengths)).tolist()
    found = get_seqlen_balanced_partitions(work, count, equal_size=False)
    return sorted(found, key=lambda members: -sum(work[index] for index in members))


def main() -> None:
    way, task = sys.argv[1], SimpleNamespace(**json.loads(sys.stdin.read()))
    torch.set_num_threads(1)
    if way == "plan":
        print(json.dumps(plan(task)))
        return
    store = task.samples * (task.prompt + task.tokens) * (64 + 2 * task.layers * task.top_k) * 3 + 2**28
    ray.init("local", include_dashboard=False, log_to_driver=False, logging_level="ERROR", object_store_memory=store, num_cpus=16)
    try:
        print(json.dumps(step(task, way)))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
