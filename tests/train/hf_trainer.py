"""The oracle of the trainer: the TrainGroup contract by transformers, autograd and torch.optim in one process.

Sequences run one by one, unpacked and unpadded; nothing of moerl's loss, packing, log-probs or engine is used. Of an algorithm it
takes the loss per token, as every trainer does. float32, or float64 for comparisons that rounding must not blur.
"""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from local_source import LocalSource
from plain_routing import following
from safetensors.torch import load_file
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from moerl.algorithms.columns import TokenColumns
from moerl.algorithms.mini_batch_loss import Loss
from moerl.train.checkpoint import checkpoint_dirs
from moerl.train.checkpoint.checkpoint_check import check, read_state
from moerl.train.engine_settings import EngineSettings
from moerl.train.memory.memory_states import MemoryStates
from moerl.types.batch import TrainBatch
from moerl.types.stats import SavedCheckpoint, StepStats
from moerl.types.stored import Here

_STATE = "state.pt"


class HFTrainGroup:
    def __init__(self, settings: EngineSettings, *, checkpoint_dir: Path, keep: int = 2, bucket_bytes: int = 2**20):
        self._settings, self._checkpoint_dir, self._keep = settings, checkpoint_dir, keep
        self._dtype = getattr(torch, settings.train.dtype)
        self.weight_source = LocalSource(self._export, bucket_bytes=bucket_bytes)
        self._memory_states = MemoryStates("none", move=lambda before, after: None, measure=dict)
        self._saved: list[SavedCheckpoint] = []

    async def start(self) -> None:
        self.model = load_model(self._settings.model_dir, self._dtype)
        self._reference = load_model(self._settings.model_dir, self._dtype) if self._settings.uses_reference else None
        adam = self._settings.train.optimizer
        decayed = [parameter for parameter in self.model.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in self.model.parameters() if parameter.ndim == 1]
        groups = [{"params": decayed, "weight_decay": adam.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=adam.lr, betas=adam.betas, eps=adam.eps)

    async def wake(self) -> int:
        return self._memory_states.wake()

    async def shed(self) -> int:
        return self._memory_states.shed()

    async def sleep(self) -> int:
        return self._memory_states.sleep()

    async def load(self) -> tuple[int, dict[str, Any]]:
        directory = checkpoint_dirs.newest(self._checkpoint_dir)
        if directory is None:
            return 0, {}
        with self._memory_states.running("load"):
            check(directory)
            saved = torch.load(directory / _STATE)
            self.model.load_state_dict(saved["model"])
            self._optimizer.load_state_dict(saved["optimizer"])
            state = read_state(directory)
        return state["version"], state

    async def save(self, version: int, state: Mapping[str, Any]) -> None:
        with self._memory_states.running("save"):
            temporary = checkpoint_dirs.begin(self._checkpoint_dir, version)
            torch.save({"model": self.model.state_dict(), "optimizer": self._optimizer.state_dict()}, temporary / _STATE)
            num_bytes = (temporary / _STATE).stat().st_size
            files = checkpoint_dirs.digest_files(temporary, [_STATE])
            checkpoint_dirs.commit(temporary, files, {"version": version, **state}, {}, keep=self._keep)
        self._saved.append(SavedCheckpoint(version=version, num_bytes=num_bytes, seconds=0.0, blocked_seconds=0.0))

    async def saved(self, *, wait: bool = False) -> list[SavedCheckpoint]:
        saved, self._saved = self._saved, []
        return saved

    async def close(self) -> None:
        self.weight_source.close()

    # -- the two verbs of a step -------------------------------------------------------------------------------

    async def logprobs(self, batch: TrainBatch, *, records_routes: bool = False) -> Here[np.ndarray]:
        return Here(self._logprobs(self.model, batch))

    async def reference_logprobs(self, batch: TrainBatch) -> Here[np.ndarray]:
        assert self._reference is not None, "settings.uses_reference is False"
        return Here(self._logprobs(self._reference, replace(batch, routes_T=None)))

    @torch.no_grad()
    def _logprobs(self, model: Any, batch: TrainBatch) -> np.ndarray:
        with self._memory_states.running("logprobs"):
            sequences = [self._sequence(model, batch, start, end)[0] for start, end in pairwise(batch.offsets)]
        return np.where(batch.response_mask_T, torch.cat(sequences).numpy(), 0)

    async def update(self, batch: TrainBatch, loss: Loss, *, lr: float) -> StepStats:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        count = min(self._settings.train.updates_per_step, batch.num_sequences)
        parts = [batch.select(part) for part in np.array_split(np.arange(batch.num_sequences), count)]
        with self._memory_states.running("update"):
            results = [self._mini_batch(part, loss) for part in parts]
        return _statistics(results, loss, lr)

    def _mini_batch(self, batch: TrainBatch, loss_of_tokens: Loss) -> dict[str, Any]:
        """One optimizer step, or none if loss or gradient is not finite: the loss, the norm, and columns over the response tokens."""
        self._optimizer.zero_grad()
        pieces = [self._sequence_loss(batch, start, end, loss_of_tokens) for start, end in pairwise(batch.offsets)]
        trained = [piece for piece in pieces if len(piece["loss"])]
        if loss_of_tokens.normalize_by == "token":
            loss = torch.cat([piece["loss"] for piece in trained]).mean()
        else:
            loss = torch.stack([piece["loss"].mean() for piece in trained]).mean()
        loss.backward()
        limit = self._settings.train.optimizer.clip_grad
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), float("inf") if limit is None else limit)
        applied = bool(loss.isfinite() & norm.isfinite())
        if applied:
            self._optimizer.step()
        columns = {name: torch.cat([piece[name].detach().double() for piece in trained]).numpy() for name in trained[0]}
        return {**columns, "loss": float(loss.detach()), "norm": float(norm), "applied": applied}

    def _sequence_loss(self, batch: TrainBatch, start: int, end: int, loss: Loss) -> dict[str, Tensor]:
        """Columns over the response tokens of one sequence; `loss` has a gradient."""
        mask_T = torch.from_numpy(batch.response_mask_T[start:end])

        def column(values_T: np.ndarray) -> Tensor:
            return torch.from_numpy(values_T[start:end])[mask_T].to(self._dtype)

        logp_T, entropy_T = (values_T[mask_T] for values_T in self._sequence(self.model, batch, start, end))
        old_T = logp_T.detach() if batch.old_logprobs_T is None else column(batch.old_logprobs_T)
        reference_T = None if batch.reference_logprobs_T is None else column(batch.reference_logprobs_T)
        if loss.objective is None:
            loss_T, clipped_T = -logp_T, torch.zeros_like(logp_T, dtype=torch.bool)
        else:
            ones_T = torch.ones_like(logp_T)
            columns = TokenColumns(
                logp_T=logp_T, whole_logp_T=logp_T, old_logp_T=old_T, rollout_logp_T=column(batch.rollout_logprobs_T),
                advantage_T=column(batch.advantages_T), mask_T=ones_T.bool(), tokens_T=ones_T * len(logp_T),
                sequence_T=torch.zeros(len(logp_T), dtype=torch.int64), num_sequences=1, all_tokens=len(logp_T), all_sequences=1,
            )  # fmt: skip
            found = loss.objective.token_loss(columns)
            loss_T, clipped_T = found.loss_T, found.clipped_T
            if loss.kl_coefficient > 0:
                distance_T = logp_T - reference_T
                loss_T = loss_T + loss.kl_coefficient * (torch.exp(-distance_T) + distance_T - 1).clamp(max=10)
        return {
            "loss": loss_T,
            "logp": logp_T,
            "entropy": entropy_T,
            "old": old_T,
            "reference": logp_T if reference_T is None else reference_T,
            "rollout": column(batch.rollout_logprobs_T),
            "clipped": clipped_T,
        }

    def _sequence(self, model: Any, batch: TrainBatch, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Log-prob of every token and entropy of the distribution it was drawn from; 0 for the first, which nothing predicts."""
        tokens = torch.from_numpy(batch.token_ids_T[start:end])
        routes = None if batch.routes_T is None else batch.routes_T[start:end]
        with WiderFloats() if self._dtype == torch.float64 else nullcontext(), following(model, routes):
            logits_TV = model(input_ids=tokens[None]).logits[0, :-1]
        table_TV = torch.log_softmax(logits_TV / self._settings.temperature, dim=-1)
        nothing = table_TV.new_zeros(1)
        logprobs_T = table_TV.gather(1, tokens[1:, None])[:, 0]
        return torch.cat([nothing, logprobs_T]), torch.cat([nothing, -(table_TV.exp() * table_TV).sum(-1)])

    # -- weights -----------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, Tensor]:
        """Under the names of the checkpoint, which transformers alone knows how to write."""
        with tempfile.TemporaryDirectory() as directory:
            self.model.save_pretrained(directory)
            files = sorted(Path(directory).glob("*.safetensors"))
            return {name: tensor for file in files for name, tensor in load_file(file).items()}

    def _export(self) -> dict[str, Tensor]:
        dtype = getattr(torch, self._settings.export_dtype)
        with self._memory_states.running("export"):
            return {name: tensor.to(dtype) for name, tensor in self.weights().items()}

    async def hosts(self) -> list[str]:
        return ["localhost"]


class WiderFloats(TorchFunctionMode):
    """transformers computes norms and the router's softmax in float32 whatever the model's dtype; here in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        args = [torch.float64 if arg is torch.float32 else arg for arg in args]
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in ({} if kwargs is None else kwargs).items()}
        return func(*args, **kwargs)


def load_model(directory: Path, dtype: torch.dtype) -> Any:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, experts_implementation="eager")
    # Rotary angles are float32 in every trainer, Megatron's too: more digits here would be a difference, not an exactness.
    rotary, model.model.rotary_emb.forward = model.model.rotary_emb.forward, None

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _no_modes():
            return rotary(*args, **kwargs)

    model.model.rotary_emb.forward = forward
    return model


@contextmanager
def _no_modes() -> Iterator[None]:
    with torch._C.DisableTorchFunction():
        yield


def _statistics(results: list[dict[str, Any]], loss: Loss, lr: float) -> StepStats:
    """As StepStats documents them; mini-batches that changed nothing count only if there is no other."""
    counted = [result for result in results if result["applied"]] or results
    first, whole = counted[0], {name: np.concatenate([result[name] for result in counted]) for name in counted[0] if name in _COLUMNS}
    mismatch = first["logp"] - first["rollout"]
    return StepStats(
        loss=float(np.mean([result["loss"] for result in counted])),
        grad_norm=max(result["norm"] for result in counted),
        learning_rate=lr,
        num_tokens=len(whole["logp"]),
        entropy=float(whole["entropy"].mean()),
        kl_old=float(_k3(whole["old"] - whole["logp"]).mean()),
        first_kl_old=float(_k3(first["old"] - first["logp"]).mean()),
        kl_reference=float(_k3(whole["logp"] - whole["reference"]).mean()) if loss.uses_reference else None,
        clip_fraction=float(whole["clipped"].mean()),
        mismatch_mean=float(np.abs(mismatch).mean()),
        mismatch_max=float(np.abs(mismatch).max()),
        mismatch_kl=float(_k3(-mismatch).mean()),
        padding_fraction=0.0,
        rank_imbalance=1.0,
        round_imbalance=1.0,
        skipped_updates=tuple("loss or gradient is not finite" for result in results if not result["applied"]),
    )


_COLUMNS = ("logp", "entropy", "old", "reference", "rollout", "clipped")


def _k3(difference: np.ndarray) -> np.ndarray:
    """KL(p || q) from log p - log q of tokens drawn from p (http://joschu.net/blog/kl-approx.html), at most 10 like moerl's."""
    return np.minimum(np.exp(-difference) + difference - 1, 10)
