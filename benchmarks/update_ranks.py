"""One training rank against two that share the experts: the same update of the same model, in turns, on a clock.

    python benchmarks/update_ranks.py

ep2: each of two ranks has half the experts and trains on half the sequences. Apart: two ranks with all experts and half the sequences each,
which say no word to each other; two cores give no more. All processes are there all the time and wait while others work. It needs two free
cores: each process has one thread.
"""

import argparse
import json
import multiprocessing as mp
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from update_overhead import LR, MODEL_OPTIONS, build, random_batch, write_model

from moerl.algorithms.mini_batch_loss import SUPERVISED
from moerl.config.schema.layout import Layout

WAYS = {"one": 1, "ep2": 2, "apart": 2}
"""Ranks of each."""


def serve(rank: int, way: str, arguments: argparse.Namespace, folder: Path, pipe: Connection) -> None:
    """One rank: an update for each message, answered with its (loss, CPU seconds)."""
    torch.set_num_threads(1)
    is_apart = way == "apart"
    num_ranks = 1 if is_apart else WAYS[way]
    store = folder / (f"{way}-{rank}" if is_apart else way)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0 if is_apart else rank, world_size=num_ranks)
    engine = build(arguments, folder, Layout(ranks=num_ranks, ep=num_ranks))
    num_tokens = arguments.tokens * arguments.micro_batches * 9 // 10 // (WAYS[way] // num_ranks)
    longest = arguments.tokens // 2
    batch = random_batch(np.random.default_rng(0), num_tokens=num_tokens, vocab_size=engine.model.vocab_size, longest=longest)
    pipe.send(sum(p.numel() for p in engine.model.chunks[0].parameters()))
    while pipe.recv():
        start = time.process_time()
        loss = engine.update(batch, SUPERVISED, lr=LR, num_updates=1).loss
        pipe.send((loss, time.process_time() - start))


class Ranks:
    def __init__(self, way: str, arguments: argparse.Namespace, folder: Path):
        context = mp.get_context("spawn")
        self.pipes, self._processes = [], []
        for rank in range(WAYS[way]):
            pipe, theirs = context.Pipe()
            self.pipes.append(pipe)
            self._processes.append(context.Process(target=serve, args=(rank, way, arguments, folder, theirs), daemon=True))
            self._processes[-1].start()
        self.num_parameters = [pipe.recv() for pipe in self.pipes]

    def update(self) -> tuple[float, float, float]:
        """Seconds on a clock, CPU seconds of all ranks, and the loss."""
        start = time.perf_counter()
        for pipe in self.pipes:
            pipe.send(True)
        answers = [pipe.recv() for pipe in self.pipes]
        return time.perf_counter() - start, sum(cpu for _, cpu in answers), answers[0][0]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(False)
        for process in self._processes:
            process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[MODEL_OPTIONS])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model(arguments, Path(folder))
        groups = {way: Ranks(way, arguments, Path(folder)) for way in WAYS}
        losses = {way: group.update()[2] for way, group in groups.items()}
        turns = [{way: group.update() for way, group in groups.items()} for _ in range(arguments.repeats)]
        for group in groups.values():
            group.close()
    print(f"losses of the first update: {json.dumps(losses)}")
    for way, group in groups.items():
        wall, cpu = (median(turn[way][column] for turn in turns) for column in (0, 1))
        print(f"{way}: {wall:.3f} s, {cpu:.3f} CPU seconds, {group.num_parameters[0] / 1e6:.1f} M parameters each")
    for way in ("ep2", "apart"):
        ratios = sorted(turn["one"][0] / turn[way][0] for turn in turns)
        print(f"{way} is {median(ratios):.2f} times as fast as one (median of pairs, {ratios[0]:.2f} to {ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
