"""Every scorer of reasoning-gym, with its own answer and with responses that are code."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from moerl.config.schema.data_config import RewardConfig, RewardTerm
from moerl.rewards.gym_scorers import EXPRESSION_TASKS, LITERAL_TASKS, disarm_scorers
from moerl.rewards.reward_pool import RewardPool
from moerl.types.groups import Prompt


def payloads(target: Path) -> list[str]:
    """Texts that make a file if they are evaluated as Python, or by sympy's parser."""
    makes = f"__import__('pathlib').Path('{target}').touch()"
    sympys = f"lambdify((), Symbol('{makes}'))()"
    return [makes, f"[{makes}]", f"[[{makes} or 1]]", f"{makes} or '1'", f"1 + {makes}", f"x + {makes}", sympys, f"sympify('{makes!r}')"]


@pytest.fixture(scope="module")
def tasks():
    """A task and one entry of each data set of the package."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    disarm_scorers()
    made = {name: reasoning_gym.create_dataset(name, size=1, seed=3) for name in sorted(DATASETS) if name != "composite"}
    return {name: (task, task[0]) for name, task in made.items()}


@pytest.mark.filterwarnings("ignore")
def test_no_scorer_executes_a_response(tasks, tmp_path):
    """In this process, without any isolation. A release of the package that evaluates in another task fails here."""
    executed = []
    for name, (task, entry) in tasks.items():
        for text in payloads(tmp_path / name):
            with contextlib.suppress(Exception):  # some scorers raise for what they cannot read
                task.score_answer(text, entry=entry)
        if (tmp_path / name).exists():
            executed.append(name)
    assert executed == []


def test_a_strict_worker_scores_the_answer_of_every_task_and_a_response_that_is_code_changes_no_later_reward(tasks):
    def asked(name: str) -> Prompt:
        extra_info = {"task": name, "args": {}, "entry": tasks[name][1]}
        return Prompt(index=0, token_ids=(1,), text="", data_source="", ground_truth="", extra_info=extra_info)

    async def main() -> tuple[dict[str, float | str], list[bool]]:
        async with RewardPool(RewardConfig(terms={"gym": RewardTerm(kind="gym")}, timeout_seconds=60.0)) as pool:
            found: dict[str, float | str] = {}
            for name, (_, entry) in tasks.items():
                score = await pool.score(asked(name), f"<answer>{entry['answer']}</answer>")
                found[name] = score.reward if score.error is None else score.error
            right = tasks["spiral_matrix"][1]["answer"]
            texts = ["[__import__('os').fork()]", right, "no idea", right, "no idea"]
            after = [(await pool.score(asked("spiral_matrix"), text)).reward == 1.0 for text in texts]
            assert not pool.error_counts
            return found, after

    found, after = asyncio.run(main())
    assert after == [False, True, False, True, False]
    # These five take other texts than the answer that they name.
    assert {name for name, score in found.items() if score != 1.0} <= {
        "boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour",
    }  # fmt: skip
    assert all(isinstance(score, float) for score in found.values())


def scores(tasks, name: str, *texts: str) -> list[float]:
    task, entry = tasks[name]
    return [task.score_answer(text, entry=entry) for text in texts]


def test_answers_that_are_lists_or_mathematics_are_still_read(tasks):
    matrix = tasks["spiral_matrix"][1]["answer"]
    assert scores(tasks, "spiral_matrix", matrix, str(matrix.split())) == [1.0, 0.1]
    letters = tasks["string_insertion"][1]["answer"]
    assert scores(tasks, "string_insertion", str(list(letters))) == [0.1]
    product = tasks["polynomial_multiplication"][1]["answer"]
    assert scores(tasks, "polynomial_multiplication", product, f"0 + {product} ", f"{product} + 1") == [1.0, 1.0, 0.0]
    integral = tasks["simple_integration"][1]["answer"]
    assert scores(tasks, "simple_integration", integral, f"{integral} + sin(x)**2 + cos(x)**2") == [1.0, 1.0]
    assert len(set(LITERAL_TASKS) | set(EXPRESSION_TASKS)) == 9
