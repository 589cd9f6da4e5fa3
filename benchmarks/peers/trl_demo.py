"""The side of trl in benchmarks/peers.py: `python trl_demo.py TASK` trains what the JSON file TASK says, in .venv-peers, without moerl.

A line `STEP/STEPS REWARD` for each step, as the terminal of moerl has it.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update({"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

rewards: list[float] = []
"""Mean of each step."""


def prefix(completions: list[str], ground_truth: list[str], **_: Any) -> list[float]:
    """moerl/rewards/verifiers.py, kind=prefix: share of the ground truth's positions that the response has right."""
    pairs = zip(completions, ground_truth, strict=True)
    found = [sum(said == wanted for said, wanted in zip(text, truth, strict=False)) / len(truth) for text, truth in pairs]
    rewards.append(sum(found) / len(found))
    return found


class Rows(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        print(f"{state.global_step}/{state.max_steps} {rewards[-1]:.3f}", flush=True)


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(task["threads"])
    experts = {} if task["experts"] is None else {"experts_implementation": task["experts"]}
    model = AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32, **experts)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **task["optimizer"])
    # That of transformers begins with a learning rate of 0.
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / max(task["warmup_steps"], 1)))
    config = GRPOConfig(
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        shuffle_dataset=False,
        **task["grpo"],
    )
    GRPOTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(task["model"]),
        reward_funcs=prefix,
        args=config,
        train_dataset=Dataset.from_list(task["prompts"]),
        optimizers=(optimizer, warmup),
        callbacks=[Rows()],
    ).train()


if __name__ == "__main__":
    main()
