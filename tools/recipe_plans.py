"""Writes configs/plan/NAME.txt for every recipe: what `moerl plan recipe=NAME --only memory` prints. A test holds each to its recipe."""

from pathlib import Path

from moerl.config.compose import options
from moerl.config.load import load
from moerl.planner.memory_plan import memory_plan

DIRECTORY = Path(__file__).parent.parent / "configs" / "plan"


def plans() -> dict[str, str]:
    """Text of each recipe's plan, by its name."""
    return {name: f"{memory_plan(load([f'recipe={name}']))}\n" for name in options("recipe")}


if __name__ == "__main__":
    for name, text in plans().items():
        (DIRECTORY / f"{name}.txt").write_text(text)
