"""Supervised warm start: a few steps on the data set's own answers, ending in a Hugging Face checkpoint the run starts from.

A phase of its own with its own optimizer, so that nothing of it (Adam's moments, its learning rate) enters the RL steps. Its
checkpoint appears by one rename; a run that was stopped before starts the phase again.
"""

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from moerl.algorithms.mini_batch_loss import SUPERVISED
from moerl.cluster.placement import ProcessPlace
from moerl.config.schema.run_config import RunConfig, SFTConfig
from moerl.models.plain_tokenizer import Tokenizer
from moerl.observe.guards import check_finite
from moerl.observe.observer import Observer
from moerl.rollout.prompts import PromptSource, demonstration
from moerl.train.batching.build_batch import sft_batch
from moerl.train.group import MegatronTrainGroup
from moerl.train.optimizer.learning_rates import learning_rate

_REPORT_EVERY = 50


async def warm_start(
    config: RunConfig, sft: SFTConfig, model_dir: Path, tokenizer: Tokenizer, prompts: PromptSource,
    places: Sequence[ProcessPlace], observe: Observer,
) -> Path:  # fmt: skip
    """The checkpoint directory with the trained weights."""
    directory = config.run_dir / "warm_start"
    if directory.exists():
        return directory
    optimizer = replace(config.train.optimizer, lr=sft.lr, warmup_steps=sft.warmup_steps)
    train = replace(config.train, optimizer=optimizer, updates_per_step=1, router_replay="off")
    as_trained = replace(config.rollout, dtype=None)  # the weights are written in the dtype of the servers
    changed = replace(config, train=train, rollout=as_trained)
    group = MegatronTrainGroup(changed, model_dir=model_dir, checkpoint_dir=directory / "unused", places=places)
    try:
        await group.start()
        for step in range(sft.num_steps):
            drawn = [prompts.prompt_at(step * sft.batch_size + i) for i in range(sft.batch_size)]
            pairs = [(prompt.token_ids, answer_ids(tokenizer, demonstration(prompt))) for prompt in drawn]
            stats = await group.update(sft_batch(pairs), SUPERVISED, lr=learning_rate(step, optimizer, sft.num_steps))
            check_finite(stats, step=step + 1, on_nonfinite=config.train.on_nonfinite)
            if (step + 1) % _REPORT_EVERY == 0 or step + 1 == sft.num_steps:
                observe.notice(f"warm start {step + 1}/{sft.num_steps}: loss {stats.loss:.4f}")
        await _write(group, model_dir, directory)
    finally:
        await group.close()
    return directory


def answer_ids(tokenizer: Tokenizer, answer: str) -> tuple[int, ...]:
    """The answer's tokens and the end-of-sequence token that closes it."""
    assert tokenizer.eos_token_id is not None, "no token closes an answer"
    return (*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id)


async def _write(group: MegatronTrainGroup, model_dir: Path, directory: Path) -> None:
    temporary = directory.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(model_dir, temporary, ignore=shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json"))
    await group.export_hf(temporary.absolute())
    os.rename(temporary, directory)
