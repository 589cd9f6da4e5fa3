"""Scoring of a step's samples, checks one by one and several in a message: CPU of driver and workers and seconds, in turns.

    python benchmarks/scoring.py --samples 2048 --tokens 8 --workers 2

The samples are asked for in one turn of the event loop, as they come from collectors. CPU of workers is of them and their supervisors.
"""

import argparse
import asyncio
import math
import statistics
import time
from dataclasses import dataclass

import psutil

from moerl.config.schema.data_config import RewardConfig, RewardTerm
from moerl.rewards import reward_pool
from moerl.rewards.reward_pool import RewardPool
from moerl.types.groups import Prompt


@dataclass(frozen=True)
class Cost:
    """Milliseconds of a sample."""

    wall: float
    driver: float
    workers: float


def worker_seconds() -> float:
    times = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return sum(each.user + each.system for each in times)


async def measure(most: int, num_samples: int, num_tokens: int, num_workers: int) -> Cost:
    reward_pool.MESSAGE_CHECKS = most
    terms = {"reward": RewardTerm(kind="prefix")}
    prompt = Prompt(index=0, token_ids=(1,), text="", data_source="repeat", ground_truth="1" * num_tokens)
    async with RewardPool(RewardConfig(terms=terms, num_workers=num_workers)) as pool:

        async def score(number: int) -> None:
            scores = await asyncio.gather(*(pool.score(prompt, "1" * num_tokens) for _ in range(number)))
            assert all(score.reward == 1.0 for score in scores)

        await score(64)
        before, began, workers = time.process_time(), time.perf_counter(), worker_seconds()
        await score(num_samples)
        took = time.process_time() - before, time.perf_counter() - began, worker_seconds() - workers
        driver, wall, workers = (1000 * each / num_samples for each in took)
        return Cost(wall=wall, driver=driver, workers=workers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    ways = {"one by one": 1, "in messages": reward_pool.MESSAGE_CHECKS}
    found: dict[str, list[Cost]] = {way: [] for way in ways}
    for _ in range(arguments.rounds):
        for way, most in ways.items():
            found[way].append(asyncio.run(measure(most, arguments.samples, arguments.tokens, arguments.workers)))
    print("milliseconds of a sample, median of", arguments.rounds)
    print(f"{'':14}{'wall':>8}{'driver':>8}{'workers':>8}")
    rows = {
        way: [statistics.median(getattr(cost, field) for cost in costs) for field in ("wall", "driver", "workers")]
        for way, costs in found.items()
    }
    # The workers' times come in hundredths of a second: of few samples there may be none.
    rows["ratio"] = [after / before if before else math.nan for before, after in zip(rows["one by one"], rows["in messages"], strict=True)]
    for way, numbers in rows.items():
        print(f"{way:14}" + "".join(f"{number:8.3f}" for number in numbers))


if __name__ == "__main__":
    main()
