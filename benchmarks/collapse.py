"""Training off policy with a server that differs from the trainer: rewards without correction, with each, with replayed routes, with both.

    python benchmarks/collapse.py --seeds 5 --jobs 2 --out build/collapse.jsonl [--case NAME ...] [--plot docs/collapse.svg]

Megatron's engine trains a tiny mixture of experts; the hf engine's model samples, with weights of `LAG` steps ago that were cast to FP8
(blocks of 128 x 128) and with noise on what its routers see. The difference is fixed here, whatever comes out. One process for each
run, without servers and driver; what --out holds is not run again.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

STEPS, LAG, NOISE = 150, 3, 0.5
"""NOISE: standard deviation of what is added to a router's input, over that of the input."""
LR, WARMUP, GROUPS, GROUP_SIZE, RESPONSE, CONTEXT = 5e-3, 10, 32, 8, 8, 16
CORRECTIONS: Mapping[str, list[dict[str, Any]]] = {
    "uncorrected": [],
    "tis": [{"kind": "tis"}],
    "tis_sequence": [{"kind": "tis", "level": "sequence"}],
    "icepop": [{"kind": "icepop"}],
    "rejection": [{"kind": "rejection", "statistic": "k1", "level": "mean", "low": 0.5, "high": 2.0}],
    "opsm": [{"kind": "opsm"}],
    "sequence_mask_tis": [{"kind": "sequence_mask_tis"}],
}
CASES: Mapping[str, dict[str, Any]] = {
    "same-weights": {"lag": 0, "noise": 0.0, "fp8": False},
    "lag-alone": {"noise": 0.0, "fp8": False},
    **{name: {"corrections": corrections} for name, corrections in CORRECTIONS.items()},
    "r3": {"replays": True},
    "tis+r3": {"corrections": CORRECTIONS["tis"], "replays": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES, help="all if not given")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--lr", type=float, default=LR)
    parser.add_argument("--noise", type=float, default=NOISE)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("build/collapse.jsonl"))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--run", nargs=2, metavar=("CASE", "SEED"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = {"steps": options.steps, "lr": options.lr, "noise": options.noise}
    if options.run:
        print(json.dumps(run(options.run[0], int(options.run[1]), **size)))
        return
    options.out.parent.mkdir(parents=True, exist_ok=True)
    done = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    of_size = [row for row in done if all(row[name] == value for name, value in size.items())]
    known, cases = {(row["case"], row["seed"]) for row in of_size}, options.case or list(CASES)
    missing = [(case, seed) for seed, case in product(range(options.seeds), cases) if (case, seed) not in known]
    with ThreadPoolExecutor(options.jobs) as pool, options.out.open("a") as out:
        for row in pool.map(lambda pair: apart(*pair, size), missing):
            out.write(json.dumps(row) + "\n")
            out.flush()
            of_size.append(row)
    rows = [row for row in of_size if row["case"] in cases and row["seed"] < options.seeds]
    print(table(rows))
    if options.plot:
        options.plot.write_text(plot(rows))


def apart(case: str, seed: int, size: Mapping[str, Any]) -> dict[str, Any]:
    """A run in a process of its own."""
    words = [f"--{name}={value}" for name, value in size.items()]
    done = subprocess.run(
        [sys.executable, __file__, *words, "--run", case, str(seed)], capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{case}, seed {seed}: {done.stderr[-2000:]}")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def run(case: str, seed: int, *, steps: int, lr: float, noise: float) -> dict[str, Any]:
    """Mean reward and mean |log-prob(trainer) - log-prob(server)| of every step."""
    import numpy as np
    import torch

    torch.set_num_threads(1)
    chosen = {"lag": LAG, "fp8": True, "corrections": [], "replays": False, "noise": noise, **CASES[case]}
    loss = _loss(chosen["corrections"])
    rewards, mismatch, overlap = [], [], []
    with tempfile.TemporaryDirectory() as directory:
        engine = _engine(Path(directory), seed, lr, replays=chosen["replays"])
        server = _Server(Path(directory) / "model", seed, noise=chosen["noise"], in_fp8=chosen["fp8"])
        published: deque[dict[str, torch.Tensor]] = deque(maxlen=chosen["lag"] + 1)
        for step in range(steps):
            published.append({name: tensor.clone() for name, tensor in engine.export(with_mtp=False)})
            server.install(published[0])
            batch, reward_S = server.step(np.random.default_rng([seed, step]), replays=chosen["replays"])
            if "old_logprobs" in loss.needs:
                batch = _with_old(batch, engine)
            stats = engine.update(batch, loss, lr=lr * min(1.0, (step + 1) / WARMUP), num_updates=1)
            rewards.append(float(reward_S.mean()))
            mismatch.append(stats.mismatch_mean)
            if stats.routing is not None and stats.routing.overlap is not None:
                overlap.append(float(np.mean(stats.routing.overlap)))
    row = {"case": case, "seed": seed, "steps": steps, "lr": lr, "noise": noise, "rewards": rewards, "mismatch": mismatch}
    return row | {"overlap": overlap}


def _loss(corrections: list[dict[str, Any]]) -> Any:
    from moerl.algorithms.mini_batch_loss import loss_of
    from moerl.config.algorithm_settings import of_plain

    plain = {"advantage": {"kind": "grpo"}, "objective": {"kind": "ppo_clip"}, "normalize_by": "token", "corrections": corrections}
    return loss_of(of_plain(plain))


def _with_old(batch: Any, engine: Any) -> Any:
    from dataclasses import replace

    return replace(batch, old_logprobs_T=engine.logprobs(batch))


def _engine(directory: Path, seed: int, lr: float, *, replays: bool) -> Any:
    import warnings

    import torch.distributed as dist

    import megatron_patches

    warnings.simplefilter("ignore")
    megatron_patches.activate()
    from moerl.config.schema.layout import Layout
    from moerl.config.schema.model_config import ScratchModel
    from moerl.config.schema.train_config import OptimizerConfig, TrainConfig
    from moerl.scratch_model import write_scratch_model
    from moerl.train.engine_settings import EngineSettings
    from moerl.train.megatron.process_groups import initialize_groups
    from moerl.train.megatron_engine import MegatronEngine

    dist.init_process_group("gloo", init_method=f"file://{directory / 'store'}", rank=0, world_size=1)
    initialize_groups(Layout(), seed)
    model = ScratchModel(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=64, num_experts=8)
    write_scratch_model(model, CONTEXT, directory / "model", seed)
    train = TrainConfig(
        optimizer=OptimizerConfig(lr=lr), dtype="float32", micro_batch_tokens=4096, router_replay="rollout" if replays else "off"
    )
    settings = EngineSettings(
        train=train, model_dir=directory / "model", max_context=CONTEXT, temperature=1.0, uses_reference=False, export_dtype="float32"
    )
    return MegatronEngine(settings)


class _Server:
    """The hf engine's model and forward passes, with slots for all samples of a step."""

    def __init__(self, directory: Path, seed: int, *, noise: float, in_fp8: bool):
        import torch
        from transformers import AutoTokenizer

        from moerl.rollout.engines.hf.forward import Forward
        from moerl.rollout.engines.hf.hf_model import checkpoint_views, load_model

        self._in_fp8, self._generator = in_fp8, torch.Generator().manual_seed(seed)
        model = load_model(directory, dtype=torch.float32, load="dummy", deterministic=False, max_context=CONTEXT)
        self._views, self._forward = checkpoint_views(model), None
        tokenizer = AutoTokenizer.from_pretrained(directory)
        self._digits = [tokenizer.encode(digit, add_special_tokens=False)[0] for digit in "0123456789"]
        self._colon = tokenizer.encode("=", add_special_tokens=False)[0]
        for name, module in model.named_modules():
            if noise and name.endswith(".mlp.gate"):
                module.register_forward_pre_hook(self._disturbed(noise))
        self._new_forward = lambda: Forward(model, num_slots=GROUPS * GROUP_SIZE, max_context=CONTEXT, prefill_chunk=2, deterministic=False)

    def _disturbed(self, noise: float) -> Any:
        def disturb(_: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            import torch

            hidden, *others = inputs
            random = torch.randn(hidden.shape, generator=self._generator, dtype=hidden.dtype)
            return (hidden + noise * hidden.std() * random, *others)

        return disturb

    def install(self, weights: Mapping[str, Any]) -> None:
        import torch

        from moerl.models.fp8_blocks import dequantized, quantized
        from moerl.models.fp8_names import is_quantized_when_published

        for name, view in self._views.items():
            tensor = weights[name]
            if self._in_fp8 and is_quantized_when_published(name, tuple(tensor.shape)):
                tensor = torch.cat(list(dequantized(*quantized(tensor, "float32"), torch.float32)))
            view.copy_(tensor)
        self._forward = self._new_forward()

    def step(self, rng: Any, *, replays: bool) -> tuple[Any, Any]:
        """Batch of GROUPS prompts, "D=" for a digit D, with GROUP_SIZE answers each; their rewards: the share of tokens that are D."""
        import numpy as np
        import torch

        from moerl.algorithms.advantages import ScoredStep
        from moerl.algorithms.algorithm import build_algorithm
        from moerl.config.algorithm_settings import algorithm
        from moerl.types.batch import TrainBatch

        count = GROUPS * GROUP_SIZE
        digit_S = np.repeat(rng.choice(self._digits, size=GROUPS), GROUP_SIZE)
        prompts = [np.array([digit, self._colon]) for digit in digit_S]
        slots, tokens, logprobs, routes = np.arange(count), [], [], []
        logits = []
        rows = self._forward.prefill_rows
        for first in range(0, count, rows):
            part = slots[first : first + rows]
            passed = self._forward.prefill(part, [prompts[slot] for slot in part], np.zeros(len(part), dtype=np.int64), with_routes=replays)
            logits.append(passed.logits)
            routes.append(passed.routes[:, :2] if replays else None)
        next_logits = torch.cat(logits)
        at_prompt = np.concatenate(routes) if replays else None
        tables = [at_prompt]
        for position in range(RESPONSE):
            table_SV = torch.log_softmax(next_logits, dim=-1)
            random = torch.from_numpy(rng.gumbel(size=tuple(table_SV.shape))).float()
            token_S = (table_SV + random).argmax(-1)
            tokens.append(token_S.numpy())
            logprobs.append(table_SV.gather(1, token_S[:, None])[:, 0].numpy())
            if position < RESPONSE - 1:
                passed = self._forward.decode(slots, token_S.numpy(), np.full(count, 2 + position), with_routes=replays)
                next_logits = passed.logits
                tables.append(passed.routes)
        token_SR, logprob_SR = np.stack(tokens, 1), np.stack(logprobs, 1)
        reward_S = (token_SR == digit_S[:, None]).mean(1)
        scored = ScoredStep(rewards_S=reward_S, group_S=np.repeat(np.arange(GROUPS), GROUP_SIZE), lengths_S=np.full(count, RESPONSE))
        advantage_S = build_algorithm(algorithm("grpo"), RESPONSE).credit(scored).advantages_S
        length = 2 + RESPONSE
        shape = (count, length)
        whole, mask, rollout = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=bool), np.zeros(shape, dtype=np.float32)
        whole[:, :2], whole[:, 2:], mask[:, 2:], rollout[:, 2:] = np.stack(prompts), token_SR, True, logprob_SR
        routes_T = None
        if replays:
            known = np.concatenate(tables, 1)  # all tokens but the last
            last = np.full((count, 1, *known.shape[2:]), _unknown(known.dtype), dtype=known.dtype)
            routes_T = np.concatenate([known, last], 1).reshape(count * length, *known.shape[2:])
        batch = TrainBatch(
            token_ids_T=whole.ravel(), response_mask_T=mask.ravel(), rollout_logprobs_T=rollout.ravel(),
            advantages_T=np.where(mask, advantage_S[:, None], 0).astype(np.float32).ravel(), offsets=np.arange(count + 1) * length,
            routes_T=routes_T,
        )  # fmt: skip
        return batch, reward_S


def _unknown(dtype: Any) -> int:
    from moerl.types.routes import unknown_route

    return unknown_route(dtype)


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| case | seeds | reward, last ten steps: median (each) | best step: median | mismatch, median step |",
        "|---|---|---|---|---|",
    ]
    for case in dict.fromkeys(row["case"] for row in rows):
        of_case = [row for row in rows if row["case"] == case]
        last = sorted(statistics.fmean(row["rewards"][-10:]) for row in of_case)
        best = statistics.median(max(row["rewards"]) for row in of_case)
        apart_by = statistics.median(statistics.median(row["mismatch"]) for row in of_case)
        each = ", ".join(f"{value:.2f}" for value in last)
        lines.append(f"| {case} | {len(of_case)} | {statistics.median(last):.2f} ({each}) | {best:.2f} | {apart_by:.3f} |")
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]]) -> str:
    """Every run as a line, a panel for each case, as SVG."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    width, height, columns = 200, 110, 4
    lines_of = -(-len(cases) // columns)
    size = f"{columns * width} {lines_of * height}"
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif" font-size="9">']
    parts.append('<rect width="100%" height="100%" fill="#fff"/>')
    for place, case in enumerate(cases):
        left, top = place % columns * width + 26, place // columns * height + 18
        parts.append(f'<text x="{left}" y="{top - 5}">{case}</text>')
        parts.append(f'<rect x="{left}" y="{top}" width="160" height="75" fill="none" stroke="#999"/>')
        parts += [f'<text x="{left - 16}" y="{top + 75 * (1 - y) + 3}">{y:g}</text>' for y in (0, 0.5, 1)]
        for row in (row for row in rows if row["case"] == case):
            count = max(1, len(row["rewards"]) - 1)
            points = " ".join(f"{left + 160 * i / count:.1f},{top + 75 * (1 - reward):.1f}" for i, reward in enumerate(row["rewards"]))
            parts.append(f'<polyline points="{points}" fill="none" stroke="#1f6fb4" stroke-width="0.8" opacity="0.8"/>')
        parts.append(f'<text x="{left + 160}" y="{top + 84}" text-anchor="end">step {max(len(row["rewards"]) for row in rows)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    main()
