"""Plans of micro-batches for a long-tailed batch: padding, imbalance and seconds of CPU time, against packing the sequences in their order.

    python benchmarks/balance.py --samples 8192 --ranks 32 --budget 32768

Imbalance is work / mean work, attention included. ranks: of the busiest rank. rounds: summed over micro-batches of the slowest rank in
each, what a run takes whose ranks wait for each other in every micro-batch (experts spread over them).
"""

import argparse
import time
from collections.abc import Callable

import numpy as np

from moerl.train.batching.micro_batch_plan import Balance, Bins, MicroBatchPlanner

ATTENTION_TOKENS = 24576
DISTRIBUTIONS = ((7.0, 1.0), (7.6, 1.2), (8.5, 0.7))
"""Mean and deviation of the logarithm of lengths."""


def in_order(lengths: np.ndarray, *, num_ranks: int, token_budget: int) -> list[Bins]:
    """Ranks take equal numbers of consecutive sequences and fill one micro-batch after the other."""
    plan: list[Bins] = []
    for members in np.array_split(np.arange(len(lengths)), num_ranks):
        bins: Bins = [[]]
        for index in members.tolist():
            if lengths[[*bins[-1], index]].sum() > token_budget:
                bins.append([])
            bins[-1].append(index)
        plan.append(bins)
    rounds = max(map(len, plan))
    return [bins + [[]] * (rounds - len(bins)) for bins in plan]


def padding(plan: list[Bins], lengths: np.ndarray, *, token_multiple: int, sequence_multiple: int) -> float:
    slots = -(-lengths // sequence_multiple) * sequence_multiple
    positions = sum(max(-(-int(slots[members].sum()) // token_multiple), 1) * token_multiple for rank in plan for members in rank)
    return 1 - lengths.sum() / positions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--budget", type=int, default=32768)
    parser.add_argument("--cp", type=int, default=2)
    parser.add_argument("--tp", type=int, default=4)
    arguments = parser.parse_args()
    sequence_multiple = 2 * arguments.cp if arguments.cp > 1 else 1
    padded = {"token_multiple": arguments.tp * sequence_multiple, "sequence_multiple": sequence_multiple}
    limits = {"num_ranks": arguments.ranks, "token_budget": arguments.budget}
    ways: dict[str, Callable[[np.ndarray], list[Bins]]] = {
        "in order": lambda lengths: in_order(lengths, **limits),
        "even ranks": MicroBatchPlanner(**limits, **padded, attention_tokens=ATTENTION_TOKENS).plan,
        "even rounds": MicroBatchPlanner(**limits, **padded, attention_tokens=ATTENTION_TOKENS, waits_in_rounds=True).plan,
    }
    print(f"{arguments.samples} samples, {arguments.ranks} ranks, {arguments.budget} tokens, cp {arguments.cp}, tp {arguments.tp}")
    print("lengths        mean  plan          rounds   padding   ranks   rounds  seconds")
    for mu, sigma in DISTRIBUTIONS:
        lengths = np.random.default_rng(0).lognormal(mu, sigma, arguments.samples).astype(np.int64).clip(16, arguments.budget)
        for name, make in ways.items():
            start = time.process_time()
            plan = make(lengths)
            seconds = time.process_time() - start
            balance = Balance.of(plan, lengths, sequence_multiple=sequence_multiple, attention_tokens=ATTENTION_TOKENS)
            print(
                f"e^({mu}+-{sigma})  {lengths.mean():5.0f}  {name:12} {len(plan[0]):6}   {padding(plan, lengths, **padded):7.3%}"
                f"  {balance.rank_imbalance:6.4f}  {balance.round_imbalance:6.4f}   {seconds:6.3f}"
            )


if __name__ == "__main__":
    main()
