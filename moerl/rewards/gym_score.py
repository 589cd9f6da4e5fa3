"""The score a reasoning-gym task gives its own answers, in [0, 1] for most tasks.

Rows come from `data.kind=gym`: extra_info holds `task`, `args` and `entry`. The answer is the last <answer>...</answer> of the
response, or all of it. Some of the package's scorers pass it to `eval`, with no more protection than the worker process gives.
"""

import json
from functools import lru_cache
from typing import Any

from moerl.config.schema.data_config import RewardTerm
from moerl.rewards.verifier import Check, Verifier


def build(term: RewardTerm) -> Verifier:
    import reasoning_gym
    from reasoning_gym.utils import extract_answer

    @lru_cache(maxsize=32)
    def task_of(name: str, args: str) -> Any:
        # Some scorers read the task's settings. One entry is all that is generated.
        return reasoning_gym.create_dataset(name, **json.loads(args) | {"size": 1})

    def verify(check: Check) -> float:
        if "entry" not in check.extra_info:
            raise ValueError("extra_info has no reasoning-gym entry: this term is for data.kind=gym")
        entry = check.extra_info["entry"]
        task = task_of(check.extra_info["task"], json.dumps(check.extra_info["args"], sort_keys=True))
        answer = extract_answer(check.text)
        try:
            return task.score_answer(answer if answer is not None else check.text.strip(), entry=entry)
        except Exception:
            # Some scorers raise on an answer they cannot read. If this one can read the right answer, the response is wrong.
            task.score_answer(entry["answer"], entry=entry)
            return 0.0

    return verify
