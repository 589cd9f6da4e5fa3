"""One training rank as a Ray actor: it joins the ranks' process group, owns Megatron engines, and sends weights.

It starts with the engine of one model; models beside it may follow, on the same groups. `model` is the name of the one that a verb is for.

The driver imports this module too, for its class, and has no torch: it is imported in the methods.

Every method but `address`, `set_environment`, `open_store`, `write_checkpoint` and those of a push, without `digest_push`, is collective:
the controller calls it on all.
"""

import logging
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import ray

from moerl.algorithms.mini_batch_loss import Loss, ValueLossSettings
from moerl.cluster.process_log import write_to
from moerl.cluster.ray_nodes import reached_at
from moerl.config.schema.run_config import NetworkConfig
from moerl.hangs.examine import memory_counter, memory_kills
from moerl.hangs.python_stacks import answer_stack_requests
from moerl.hangs.watched import ProcessId
from moerl.hardware.network_settings import find_settings, variables
from moerl.hardware.nvidia import bind_near
from moerl.train.batching.micro_batch_plan import MicroBatchPlanner
from moerl.train.checkpoint.checkpoint_check import faults_of_part
from moerl.train.checkpoint.checkpoint_dirs import FileDigests, WrittenShards
from moerl.train.megatron.attention_backend import attention_backend
from moerl.train.push.push_source import PushOrder, RankPush
from moerl.train.rank_calls import RankPlace
from moerl.train.rank_progress import keep_record, open_record
from moerl.types.batch import Batch
from moerl.types.errors import ConfigError, problem
from moerl.types.stats import StepStats
from moerl.types.stored import InStore, keep
from moerl.weights.plan.run_plan import Outline

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from moerl.train.megatron_engine import EngineSettings, MegatronEngine

logger = logging.getLogger(__name__)

SAVE_THREAD = "save"
"""Ray's concurrency group of what runs beside training: the verbs of the thread that writes checkpoints."""


@keep_record(beside=SAVE_THREAD)
class TrainWorker:
    def __init__(self, rank: int, num_ranks: int, gpus: tuple[str, ...]):
        """`gpus`: those of this node that it may see; nothing has asked CUDA for them yet."""
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        import torch

        self._gpus = gpus
        self._rank, self._num_ranks = rank, num_ranks
        self._store: TCPStore | None = None
        self._beside: dict[str, MegatronEngine] = {}
        self._attention: str | None = None
        torch.set_num_threads(1)

    def place(self, log: Path) -> RankPlace:
        """From here on the process can be looked at from outside, and what it writes goes to a log of its own."""
        answer_stack_requests()
        open_record()
        log = write_to(log)
        host, node_id = socket.gethostname(), ray.get_runtime_context().get_node_id()
        logger.info("rank %d of %d on %s, process %d", self._rank, self._num_ranks, host, os.getpid())
        counter = memory_counter()
        return RankPlace(
            host=host,
            node_id=node_id,
            process=ProcessId.of(os.getpid()),
            log=log,
            memory_counter=counter,
            memory_kills=None if counter is None else memory_kills(counter),
        )

    def address(self) -> str:
        """Address at which the cluster's nodes reach this one, loopback where there is one; a host's name may stand for a loopback."""
        return reached_at() or "127.0.0.1"

    def set_environment(
        self, network: NetworkConfig, environment: Mapping[str, str | int], deepep: bool, folders: Sequence[str] = ()
    ) -> dict[str, str]:
        """Set what libraries are told of this node's links, and the rank's own variables, before one of them asks; returns it. `deepep`:
        tokens go to other nodes by it. `folders`: where a user's code may import more, on nodes that have them."""
        sys.path += [folder for folder in folders if folder not in sys.path]
        found = variables(find_settings(network, "train", reached_at=reached_at(), deepep=deepep))
        found |= {name: str(value) for name, value in environment.items()}
        if network.detect and self._gpus:
            logger.info("rank %d %s", self._rank, bind_near(self._gpus))
        os.environ.update(found)
        return found

    def open_store(self) -> int:
        """Rank 0: the port of the store at which the ranks meet. Bound here, so that nobody can take it in between."""
        from moerl.train.rank_store import open_store

        self._store = open_store(self.address(), self._num_ranks)
        return self._store.port

    def start(self, settings: "EngineSettings", seed: int, host: str, port: int, timeout_seconds: float) -> tuple[str, ...]:
        """Join the others and build the engine; returns the names of the active patches."""
        began = time.monotonic()
        import torch
        import torch.distributed as dist

        import megatron_patches
        from moerl.train import rank_imports
        from moerl.train.rank_store import join_store

        if self._gpus and not torch.cuda.is_available():
            reason = f"PyTorch {torch.__version__} cannot use the GPU that this rank was given, and would train on CPU without a word"
            fix = "make gpu, moerl doctor to see what is wrong with the node; placement.device=cpu trains on CPU"
            raise ConfigError([problem("placement.device", "auto", "needs a PyTorch for these GPUs", reason, fix)])
        rank_imports.load(with_reference=settings.train.reference_te)
        from moerl.train.megatron.process_groups import initialize_groups
        from moerl.train.megatron_engine import MegatronEngine

        logger.info("importing Megatron took %.1f s", time.monotonic() - began)
        timeout = timedelta(seconds=timeout_seconds)
        store = self._store if self._store is not None else join_store(host, port, self._num_ranks, timeout_seconds)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=self._rank, world_size=self._num_ranks, timeout=timeout)
        groups = initialize_groups(settings.train.layout, seed, timeout_seconds=timeout_seconds, reloadable=settings.train.destroy_groups)
        self._engine = MegatronEngine(settings, groups)
        self._push = RankPush(self._engine.pushed, self._engine.pushing, self._rank, self.address())
        logger.info("fused kernels: %s", self._engine.model.fusions)
        megatron_patches.assert_active()
        return megatron_patches.active_names()

    def add_model(self, model: str, settings: "EngineSettings") -> None:
        from moerl.train.megatron_engine import MegatronEngine

        self._beside[model] = MegatronEngine(settings)

    def _of(self, model: str) -> "MegatronEngine":
        return self._beside.get(model, self._engine)

    def wake(self, model: str) -> int:
        return self._of(model).wake()

    def shed(self, model: str) -> int:
        return self._of(model).shed()

    def sleep(self, model: str) -> int:
        return self._of(model).sleep()

    def data_rank(self) -> int:
        """Which of the shares of a batch this rank gets."""
        from megatron.core import parallel_state

        return parallel_state.get_data_parallel_rank()

    def planner(self, model: str) -> MicroBatchPlanner:
        return self._of(model).step.planner

    def logprobs(self, batch: Batch, model: str, records_routes: bool) -> InStore[np.ndarray] | None:
        """From rank 0: all have the same."""
        return self._stored(self._of(model).logprobs(batch, records_routes=records_routes))

    def reference_logprobs(self, batch: Batch, model: str) -> InStore[np.ndarray] | None:
        return self._stored(self._of(model).reference_logprobs(batch))

    def values(self, batch: Batch, model: str) -> InStore[np.ndarray] | None:
        return self._stored(self._of(model).values(batch))

    def update(self, batch: Batch, model: str, loss: Loss | ValueLossSettings, lr: float, num_updates: int) -> StepStats:
        stats = self._of(model).update(batch, loss, lr=lr, num_updates=num_updates)
        self._tell_attention()
        return stats

    def _tell_attention(self) -> None:
        """Log which implementation of attention runs, when it is first known and when it changes."""
        if (found := attention_backend()) != self._attention:
            self._attention = found
            logger.info("attention runs by %s", found)

    def _stored(self, values_T: np.ndarray) -> InStore[np.ndarray] | None:
        return keep(values_T) if self._rank == 0 else None

    # -- checkpoints -------------------------------------------------------------------------------------------

    def stage_checkpoint(self, model: str, copies: bool) -> int:
        """Fix what the rank will write; returns its bytes. With `copies` training may go on before it is written."""
        return self._of(model).stage(copies=copies)

    @ray.method(concurrency_group=SAVE_THREAD)
    def write_checkpoint(self, model: str, directory: Path) -> WrittenShards:
        """Not collective."""
        return self._of(model).shards.writer.write(directory)

    @ray.method(concurrency_group=SAVE_THREAD)
    def finish_checkpoint(self, model: str, directory: Path, indices: list[bytes]) -> FileDigests:
        """Rank 0, when every rank has written."""
        return self._of(model).shards.writer.finish(directory, indices)

    def faults_of_checkpoint(self, directory: Path, but: list[str]) -> list[str]:
        """In this rank's share of the files, without `but`. Not collective."""
        return faults_of_part(directory, part=self._rank, num_parts=self._num_ranks, but=but)

    def load(self, model: str, directory: Path, files: FileDigests) -> list[str]:
        """Names of damaged files of all ranks."""
        return self._of(model).load(directory, files)

    def export_hf(self, model: str, directory: Path, shard_bytes: int) -> None:
        """Rank 0 writes the weights as Hugging Face safetensors."""
        from moerl.models.hf_checkpoint import write_shards

        tensors = self._of(model).export()
        if self._rank == 0:
            write_shards(tensors, directory, shard_bytes=shard_bytes)
        for _ in tensors:
            raise AssertionError("only rank 0 receives exported tensors, and it has read them all")

    # -- weight push: RankPush of train/push/push_source.py. Only digest_push is collective ---------------------

    def outline_push(self, bucket_bytes: int) -> Outline:
        return self._push.outline(bucket_bytes)

    def listen(self, order: PushOrder) -> str:
        return self._push.listen(order)

    def connect(self, address: str, num_readers: int) -> None:
        self._push.connect(address, num_readers)

    def digest_push(self) -> list[str]:
        return self._push.digests()

    def send_push(self) -> int:
        return self._push.send()

    def finish_push(self) -> None:
        self._push.finish()
