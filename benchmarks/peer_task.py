"""The task of benchmarks/peers.py: the demo's run, and what of it trl's GRPOTrainer is told, which follows from the run's settings."""

from pathlib import Path
from typing import Any

from moerl.config.derive.model_configs import model_config
from moerl.config.derive.model_shape import shape_of_config
from moerl.config.schema.run_config import RunConfig
from moerl.models.plain_tokenizer import Tokenizer
from moerl.rollout.datasets.load_dataset import load_dataset
from moerl.rollout.prompts import PromptSource
from moerl.starting_model import load_model

RECIPE = "grpo-tiny-moe-1n2g-sync"
PROMPT_TOKENS = 2
"""A digit and a sign."""
LONGEST_PROMPT = 16
"""data.max_prompt_tokens of the demo, for which there must be room in the context."""
LOSS_TYPES = {"sequence": "grpo", "token": "dapo", "fixed_length": "dr_grpo"}
"""Of trl, by algorithm.normalize_by."""


def overrides(tokens: int, steps: int, directory: Path, more: list[str]) -> list[str]:
    """Command line of `moerl train`: the demo with responses of `tokens` tokens, without checkpoints on the way."""
    run = [f"recipe={RECIPE}", f"num_steps={steps}", "save_every=0", f"output_dir={directory}", "observe.tensorboard=false"]
    return [*run, f"rollout.max_response_tokens={tokens}", f"model.max_context={max(32, LONGEST_PROMPT + tokens)}", *more]


def trl_task(config: RunConfig, *, threads: int, experts: str) -> dict[str, Any]:
    """Settings of benchmarks/peers/trl_demo.py. The model is written to the run's directory, where `moerl train` finds it."""
    optimizer, objective = config.train.optimizer, config.algorithm.objective
    assert objective.kind == "ppo_clip" and optimizer.decay == "constant" and config.train.updates_per_step == 1
    model = load_model(config)
    samples, micro_batches = config.groups_per_step * config.group_size, num_micro_batches(config)
    return {
        "model": str(model.directory.absolute()),
        "prompts": prompts(config, model.tokenizer),
        "threads": threads,
        "experts": None if shape_of_config(model_config(config.model)).num_experts is None else experts,  # None: a dense model
        "warmup_steps": optimizer.warmup_steps,
        "optimizer": {"lr": optimizer.lr, "betas": optimizer.betas, "eps": optimizer.eps, "weight_decay": optimizer.weight_decay},
        "grpo": {
            "output_dir": str(config.run_dir.absolute() / "trl"),
            "max_steps": config.num_steps,
            "seed": config.seed,
            "num_generations": config.group_size,
            "max_completion_length": config.rollout.max_response_tokens,
            "temperature": config.rollout.temperature,
            "generation_batch_size": samples,
            "per_device_train_batch_size": samples // micro_batches,
            "gradient_accumulation_steps": micro_batches,
            "max_grad_norm": optimizer.clip_grad,
            "loss_type": LOSS_TYPES[config.algorithm.normalize_by],
            "scale_rewards": "group",
            "epsilon": objective.clip_low,
            "epsilon_high": objective.clip_high,
            "beta": config.algorithm.kl_coefficient,
            "router_aux_loss_coef": 0.0,
        },
    }


def prompts(config: RunConfig, tokenizer: Tokenizer) -> list[dict[str, str]]:
    """Every prompt of the run in the order in which it is drawn, once for each group."""
    source = PromptSource(
        load_dataset(config.data, seed=config.seed), tokenizer, config.data,
        seed=config.seed, max_context=config.model.max_context, max_response_tokens=config.rollout.max_response_tokens,
    )  # fmt: skip
    drawn = map(source.prompt_at, range(config.num_steps * config.groups_per_step))
    return [{"prompt": prompt.text, "ground_truth": prompt.ground_truth} for prompt in drawn]


def num_micro_batches(config: RunConfig) -> int:
    """Parts of trl's step: the fewest, equal ones, of which each has no more tokens than moerl's ranks together have at a time."""
    samples = config.groups_per_step * config.group_size
    at_a_time = config.train.micro_batch_tokens * config.train.layout.ranks
    longest = PROMPT_TOKENS + config.rollout.max_response_tokens
    return next(parts for parts in range(1, samples + 1) if samples % parts == 0 and samples // parts * longest <= at_a_time)
