"""Forward passes over slots: prompts in chunks, then one token per row.

deterministic: every pass of a kind has one fixed shape, whatever it carries, and a row attends to as many columns as its own positions
ask for, so that its result has the same bits in any company. Otherwise the shapes are the smallest powers of two that hold the rows.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from moerl.config.derive.model_shape import shape_of_config
from moerl.models.families.qwen3_next import LINEAR
from moerl.models.find_family import find_family
from moerl.models.transformers_config import written_config
from moerl.rollout.engines.hf.cache import COLUMN_MULTIPLE, KeyRun, Rows, SlotCache
from moerl.rollout.engines.hf.experts import share_pass_tokens
from moerl.types.routes import RouteShape


class RouteRecorder:
    """Experts that the routers of a transformers model choose, as its forward passes run. Costs nothing but while it records."""

    def __init__(self, model: PreTrainedModel, shape: RouteShape | None):
        """`shape` None: a dense model, of which there is nothing to record."""
        router = f".mlp.{find_family(written_config(model.config)).served.router}"
        self._gates = [module for name, module in model.named_modules() if name.endswith(router)]
        self._shape = shape
        expected = 0 if shape is None else shape.num_layers
        assert len(self._gates) == expected, f"{len(self._gates)} routers in a model with {expected} layers of experts"

    @contextmanager
    def recording(self) -> Iterator[list[torch.Tensor]]:
        """The list gets [tokens of the pass, top_k] of every layer with experts, in order."""
        chosen: list[torch.Tensor] = []
        # A router returns logits, weights and experts (transformers, models/qwen3_moe and deepseek_v3, TopKRouter).
        hooks = [gate.register_forward_hook(lambda _, __, output: chosen.append(output[2])) for gate in self._gates]
        try:
            yield chosen
        finally:
            for hook in hooks:
                hook.remove()

    def table(self, chosen: list[torch.Tensor], rows: int) -> np.ndarray:
        """Routes that were recorded in one pass over `rows` rows: [rows, tokens per row, layers, top_k]."""
        assert self._shape is not None
        shape = (rows, -1, self._shape.num_layers, self._shape.top_k)
        return torch.stack(chosen, dim=1).numpy().astype(self._shape.dtype).reshape(shape)


MOST_PADDING = 4
"""Rows: attention of a few costs what a call does."""

PREFILL_TOKENS = 512
"""Tokens of one prefill pass, over all its rows: enough to keep one CPU core's matrix units busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """Results of a pass over n rows."""

    logits: torch.Tensor  # [n, vocab], of the next token
    routes: np.ndarray | None  # uint8 or uint16 [n, tokens, layers, top_k], if they were asked for; padding behind a row's tokens


class Forward:
    """The model with its cache."""

    def __init__(self, model: PreTrainedModel, *, num_slots: int, max_context: int, prefill_chunk: int, deterministic: bool):
        config = model.config
        self.cache = SlotCache(config, num_slots=num_slots, max_context=max_context, dtype=model.dtype)
        self.prefill_chunk = prefill_chunk
        self.prefill_rows = min(num_slots, max(1, PREFILL_TOKENS // prefill_chunk))
        self.vocab_size: int = config.vocab_size
        self._deterministic = deterministic
        self._body, self._head = model.base_model, model.get_output_embeddings()
        self._dtype = model.dtype
        self._query_groups = config.num_attention_heads // config.num_key_value_heads
        written = written_config(config)
        served = find_family(written).served
        self._has_index = served.has_index
        self._has_delta_nets = LINEAR in (getattr(config, "layer_types", None) or ())
        self._window: int | None = config.sliding_window if served.has_windows else None
        self.routes = shape_of_config(written).routes
        self._recorder = RouteRecorder(model, self.routes)
        self._pass_tokens = share_pass_tokens(model)

    @torch.inference_mode()
    def prefill(self, slots: np.ndarray, chunks: Sequence[np.ndarray], starts: np.ndarray, *, with_routes: bool) -> Passed:
        """After each chunk of at most prefill_chunk tokens; chunk i continues slots[i] at starts[i].

        n is at most prefill_rows.
        """
        lengths = np.array([len(chunk) for chunk in chunks])
        rows, columns = (
            (self.prefill_rows, self.prefill_chunk)
            if self._deterministic
            else (_bucket(len(slots), self.prefill_rows), _bucket(int(lengths.max()), self.prefill_chunk))
        )
        ids, positions = np.zeros((2, rows, columns), dtype=np.int64)
        used = np.arange(columns) < _padded(lengths, rows)[:, None]
        ids[used] = np.concatenate(chunks)
        positions[used] = (np.arange(columns) + _padded(starts, rows)[:, None])[used]
        hidden, routes = self._run(ids, positions, used, _padded(slots, rows), with_routes)
        last = torch.from_numpy(np.maximum(_padded(lengths, rows) - 1, 0))
        logits = self._head(hidden[torch.arange(rows), last])[: len(slots)]
        return Passed(logits=logits, routes=None if routes is None else routes[: len(slots)])

    @torch.inference_mode()
    def decode(self, slots: np.ndarray, tokens: np.ndarray, positions: np.ndarray, *, with_routes: bool) -> Passed:
        """After `tokens` [n], which stand at `positions` [n] of `slots` [n]."""
        if self._deterministic or len(slots) == self.cache.num_slots:
            rows, at, row_slots = self.cache.num_slots, slots, None
        else:
            rows, at = _bucket(len(slots), self.cache.num_slots), np.arange(len(slots))
            row_slots = _padded(slots, rows)
        ids, row_positions = np.zeros((2, rows, 1), dtype=np.int64)
        used = np.zeros((rows, 1), dtype=bool)
        ids[at, 0], row_positions[at, 0], used[at, 0] = tokens, positions, True
        hidden, routes = self._run(ids, row_positions, used, row_slots, with_routes)
        logits = self._head(hidden[:, 0])[torch.from_numpy(at)]
        return Passed(logits=logits, routes=None if routes is None else routes[at])

    def _run(
        self, ids: np.ndarray, positions: np.ndarray, used: np.ndarray, slots: np.ndarray | None, with_routes: bool
    ) -> tuple[torch.Tensor, np.ndarray | None]:
        """Hidden states [B, C, hidden] of ids [B, C], and where the tokens went. Where `used` is false, the token is padding."""
        if not with_routes:
            return self._hidden(ids, positions, used, slots), None
        with self._recorder.recording() as chosen:
            hidden = self._hidden(ids, positions, used, slots)
        return hidden, self._recorder.table(chosen, len(ids))

    def _hidden(self, ids: np.ndarray, positions: np.ndarray, used: np.ndarray, slots: np.ndarray | None) -> torch.Tensor:
        lengths = self._kv_lengths(positions.max(axis=1) + 1)
        kv_length = self.cache.scratch_column if self._deterministic else int(lengths.max())
        write_at = torch.from_numpy(np.where(used, positions, self.cache.scratch_column))
        position_ids = torch.from_numpy(positions)
        self._pass_tokens.is_used = None if used.all() else used.ravel()
        row_slots = self.cache.all_slots if slots is None else torch.from_numpy(slots)
        self.cache.rows = Rows(slots=row_slots, write_at=write_at, kv_length=kv_length)
        return self._body(
            input_ids=torch.from_numpy(ids),
            position_ids=position_ids,
            attention_mask=self._masks(position_ids, kv_length),
            past_key_values=self.cache,
            use_cache=True,
            key_runs=_runs(lengths, used[:, 0]),
        ).last_hidden_state

    def _masks(self, positions: torch.Tensor, kv_length: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """Masks by type of layer, if some layers have windows or indexers (transformers, config.layer_types)."""
        full = self._mask(positions, kv_length, None)
        if self._has_index:
            return {"indexed_attention": full}
        if self._has_delta_nets:
            return {"full_attention": full, LINEAR: full}
        if self._window is None:
            return full
        return {"full_attention": full, "sliding_attention": self._mask(positions, kv_length, self._window)}

    def _mask(self, positions: torch.Tensor, kv_length: int, window: int | None) -> torch.Tensor:
        """[B, 1, groups * C, kv_length], 0 where a query sees a key and -inf elsewhere; see `cache.attend` for the axis of groups.

        `window`: positions that a query sees, its own among them.
        """
        distance = positions[..., None] - torch.arange(kv_length)
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, -torch.inf)
        return mask.repeat(1, self._query_groups, 1)[:, None]

    def _kv_lengths(self, needed: np.ndarray) -> np.ndarray:
        """Columns that rows read, int64 [B], which need so many: powers of two. The scratch column is never among them, so that a pass
        reads finite numbers only."""
        if not self._deterministic:  # one call for all is faster than one for each length
            needed = np.full(len(needed), needed.max())
        powers = 1 << np.ceil(np.log2(np.maximum(needed, COLUMN_MULTIPLE))).astype(np.int64)
        return np.minimum(powers, self.cache.scratch_column)


def _runs(lengths: np.ndarray, is_used: np.ndarray) -> list[KeyRun]:
    """Rows that are used and read as many columns, together with padding between them that is not worth a call more."""
    rows = np.flatnonzero(is_used)
    breaks = np.flatnonzero((np.diff(rows) > MOST_PADDING + 1) | (np.diff(lengths[rows]) != 0)) + 1
    return [KeyRun(first=int(run[0]), end=int(run[-1]) + 1, kv_length=int(lengths[run[0]])) for run in np.split(rows, breaks)]


def _bucket(number: int, limit: int) -> int:
    """The smallest power of two that is at least `number`, or `limit`."""
    return min(1 << (number - 1).bit_length(), limit)


def _padded(values: np.ndarray, rows: int) -> np.ndarray:
    """int64 [rows]: `values`, then zeros."""
    return np.concatenate([values, np.zeros(rows - len(values), dtype=np.int64)]).astype(np.int64)
