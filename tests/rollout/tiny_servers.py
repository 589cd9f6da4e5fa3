"""Tiny checkpoints, rollout engines that serve them, and a trainer's side that pushes real bytes."""

import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from canned_server import Letters
from local_source import LocalSource
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen3Config, Qwen3MoeConfig

from moerl.cluster.run_secret import RunSecret
from moerl.config.algorithm_settings import algorithm
from moerl.config.derive.model_shape import read_config, shape_of_config
from moerl.config.schema.data_config import RewardConfig, RewardTerm, TinyData
from moerl.config.schema.model_config import ModelConfig
from moerl.config.schema.rollout_config import RolloutConfig
from moerl.config.schema.run_config import RunConfig
from moerl.config.schema.train_config import OptimizerConfig, TrainConfig
from moerl.models import fp8_blocks, fp8_names
from moerl.rollout.build_engines import build_engines
from moerl.rollout.engines.fake_engine import FakeEngine
from moerl.rollout.fleet.collector import Answer, Intake, LocalCollector
from moerl.rollout.server.client import HTTPEngine
from moerl.rollout.server.contract import EngineHealth, RolloutEngine
from moerl.rollout.server.limits import Limits
from moerl.rollout.server.spread_process import NodeOfServer
from moerl.types.completion import Completion
from moerl.types.push import Transport
from moerl.types.routes import RouteShape
from moerl.types.stored import Here
from moerl.weights.plan.fp8_pairs import in_fp8
from moerl.weights.plan.spec_tensors import spec_of
from moerl.weights.sync import WeightSync

VOCAB, MAX_CONTEXT, MAX_RUNNING = 61, 256, 4
NATIVE_MAX_CONTEXT = 640
"""Of other engines, which are so fast that a test needs longer completions to find them unfinished."""
SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=NATIVE_MAX_CONTEXT,
    initializer_range=0.2,
)
CONFIGS = {
    "moe": Qwen3MoeConfig(**SHAPE, moe_intermediate_size=48, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True),
    "dense": Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "latent": DeepseekV3Config(
        **SHAPE | {"num_key_value_heads": 4, "head_dim": 8}, moe_intermediate_size=48, n_routed_experts=8, num_experts_per_tok=2,
        n_group=4, topk_group=1, first_k_dense_replace=1, q_lora_rank=24, kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8,
        v_head_dim=10,
    ),
    "moe32": Qwen3MoeConfig(
        **SHAPE | {"head_dim": 32}, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True
    ),
    "dense32": Qwen3Config(**SHAPE | {"head_dim": 32}, tie_word_embeddings=True),
    "latent512": DeepseekV3Config(
        **SHAPE | {"num_key_value_heads": 4, "head_dim": 64, "initializer_range": 0.1}, moe_intermediate_size=64, n_routed_experts=8,
        num_experts_per_tok=2, n_group=4, topk_group=2, first_k_dense_replace=1, q_lora_rank=32, kv_lora_rank=512, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128,
    ),
    "moe256": Qwen3MoeConfig(
        **SHAPE | {"hidden_size": 128, "head_dim": 128, "initializer_range": 0.1}, moe_intermediate_size=256, num_experts=4,
        num_experts_per_tok=2, norm_topk_prob=True,
    ),
    "latent576": DeepseekV3Config(
        **SHAPE | {"num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 128, "initializer_range": 0.1}, moe_intermediate_size=128,
        n_routed_experts=8, num_experts_per_tok=2, n_group=4, topk_group=2, first_k_dense_replace=1, q_lora_rank=128, kv_lora_rank=512,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    ),
}  # fmt: skip
"""dense: tied embeddings. latent: latent attention, a bias that helps to choose experts. With a number: in sizes for
which vLLM has CPU kernels. moe256, latent576: in sizes of blocks of FP8, those of the first in two parts too."""
SERVER_OPTIONS = {"moe": ["--deterministic"], "dense": [], "latent": ["--deterministic"]}

ROUTES = {
    "fake": RouteShape(num_layers=2, top_k=2, num_experts=300), "moe": RouteShape(num_layers=2, top_k=2, num_experts=8),
    "latent": RouteShape(num_layers=1, top_k=2, num_experts=8),
}  # fmt: skip
"""Of those that have experts."""

NATIVE = ("sglang-dense", "sglang-moe", "sglang-latent", "vllm-dense32", "vllm-moe32", "vllm-latent512")
"""Engine and checkpoint."""
TURN = {"sglang-moe": 0, "vllm-latent512": 0, "sglang-dense": 0, "sglang-latent": 1, "vllm-moe32": 1, "vllm-dense32": 1}
"""Which every second change starts of the servers, each of which takes the CPU of a whole run until it answers: both engines, experts
and latent attention in every change, and all of them in two."""


def native_param(kind: str) -> Any:
    """One of NATIVE as a parameter of a test."""
    return pytest.param(kind, marks=[pytest.mark.engine, pytest.mark.matrix(turn=TURN[kind])])


NATIVE_PARAMS = [native_param(kind) for kind in NATIVE]
SERVED = ["fake", "moe", "dense", *NATIVE_PARAMS]
"""Each engine in turn: the fake, a deterministic mixture of experts, a fast dense model with tied embeddings."""
NATIVE_LONG = {"sglang-latent": 300, "vllm-latent512": 200, "sglang-kimi_k2": 200, "vllm-kimi_k2": 200}
"""`Served.long` of those that take the longest for a token; of the others 500."""


def collector(routes: RouteShape | None = None) -> LocalCollector:
    return LocalCollector(Intake(vocab_size=VOCAB, decoder=Letters(), routes=routes), keep=Here)


def whole(answer: Answer) -> Completion:
    return answer.completion.whole(answer.completion.payload.get())


Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    directory: Path
    tensors: Tensors
    """As the checkpoint file names them."""


class Source(LocalSource):
    """The trainer's side of a push: the tensors of one version. `damaged` names a tensor whose digest is announced wrongly."""

    def __init__(self, tensors: Tensors, *, damaged: str = ""):
        super().__init__(lambda: tensors, bucket_bytes=20_000)
        self.damaged = damaged

    async def digests(self) -> Mapping[int, Sequence[str]]:
        names = [entry.name for bucket in self.sender._job for entry in bucket.entries]
        found = (await super().digests())[0]
        return {0: ["0" * 32 if name == self.damaged else digest for name, digest in zip(names, found, strict=True)]}


async def push(engine: RolloutEngine, tensors: Tensors, version: int, *, transport: Transport = "ipc", damaged: str = "") -> None:
    source = Source(tensors, damaged=damaged)
    try:
        await WeightSync(source, {engine.name: engine}, transport=transport, settle_seconds=25).push(version)
    finally:
        source.close()


@dataclass(frozen=True, kw_only=True)
class Served:
    """A started engine with its checkpoint's weights as version 1."""

    engine: RolloutEngine
    tensors: Tensors
    max_context: int = MAX_CONTEXT
    long: int = 200
    """Tokens of a completion that is still running whenever a test looks at it."""

    async def push(self, version: int, *, scale: float = 1.0, transport: Transport = "ipc", damaged: str = "") -> None:
        """The checkpoint's tensors times `scale`."""
        tensors = {name: tensor * scale for name, tensor in self.tensors.items()}
        await push(self.engine, tensors, version, transport=transport, damaged=damaged)


def write_checkpoint(directory: Path, name: str) -> Checkpoint:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.2)
    model.save_pretrained(directory)
    return Checkpoint(directory=directory, tensors=load_file(directory / "model.safetensors"))


def server_command(directory: Path, *options: object) -> list[str]:
    fixed = ["--model", directory, "--max-context", MAX_CONTEXT, "--max-running", MAX_RUNNING, "--prefill-chunk", 8]
    return [sys.executable, "-m", "moerl.rollout.engines.hf", *map(str, [*fixed, *options])]


def as_pairs(tensors: Tensors, scale_format: fp8_blocks.ScaleFormat = "float32") -> Tensors:
    """As `moerl convert --dtype fp8` writes them."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        names = list(in_fp8([spec_of(name, tensor)]))
        found |= zip(names, [tensor] if len(names) == 1 else fp8_blocks.quantized(tensor, scale_format), strict=True)
    return found


def values_of(pairs: Tensors) -> Tensors:
    """What the pairs stand for, in float32."""
    values = {name: tensor for name, tensor in pairs.items() if not name.endswith(fp8_names.SCALE_SUFFIX)}
    names = values.keys() & {scales.removesuffix(fp8_names.SCALE_SUFFIX) for scales in pairs.keys() - values.keys()}
    quantized = {name: fp8_blocks.dequantized(values[name], pairs[name + fp8_names.SCALE_SUFFIX], torch.float32) for name in names}
    return values | {name: torch.cat(list(parts)) for name, parts in quantized.items()}


def hf_engine(directory: Path, log_path: Path, *options: object, port: int = 0, start_seconds: float = 120) -> HTTPEngine:
    command = server_command(directory, "--port", port, *options)
    return HTTPEngine([NodeOfServer(command=command)], secret=RunSecret.new(), port=port, log_path=log_path, start_seconds=start_seconds)


def native_engine(kind: str, checkpoint: Checkpoint, log_dir: Path, **rollout: Any) -> HTTPEngine:
    (engine,) = build_engines(native_config(kind, checkpoint, **rollout), checkpoint.directory, log_dir, RunSecret.new())
    return engine


def native_config(kind: str, checkpoint: Checkpoint, **rollout: Any) -> RunConfig:
    """`kind`: "sglang-moe" and so on."""
    name, _, _ = kind.partition("-")
    replays = name == "sglang" and shape_of_config(read_config(checkpoint.directory)).routes is not None
    return RunConfig(
        name="run",
        num_steps=1,
        groups_per_step=1,
        group_size=2,
        model=ModelConfig(path=str(checkpoint.directory), max_context=NATIVE_MAX_CONTEXT),
        data=TinyData(task="repeat"),
        reward=RewardConfig(terms={"exact": RewardTerm(kind="exact")}),
        algorithm=algorithm("grpo"),
        train=TrainConfig(
            optimizer=OptimizerConfig(lr=1e-3),
            dtype="float32",
            router_replay="rollout" if replays else "off",
        ),
        rollout=RolloutConfig(engine=name, max_response_tokens=16, max_running=MAX_RUNNING, prefill_chunk=128, **rollout),
    )


def new_fake(checkpoint: Checkpoint) -> FakeEngine:
    expected = {name: spec_of(name, tensor) for name, tensor in checkpoint.tensors.items()}
    limits = Limits(max_context=MAX_CONTEXT, vocab_size=VOCAB, routes=ROUTES["fake"])
    return FakeEngine("fake-0", limits=limits, expected=expected, max_running=MAX_RUNNING)


async def until(engine: RolloutEngine, condition: Callable[[EngineHealth], bool]) -> None:
    """Returns when the engine's health satisfies the condition, which must come true within a minute."""
    deadline = time.monotonic() + 60
    while not condition(health := await engine.health()):
        assert time.monotonic() < deadline, health
        await asyncio.sleep(0)  # the fake answers at once, and its requests need their turn
