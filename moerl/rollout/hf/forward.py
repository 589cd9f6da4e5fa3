"""Forward passes over slots: prompts in chunks, then one token per row.

deterministic: every pass of a kind has one fixed shape, whatever it carries, so that a row's result has the same bits in any company.
Otherwise the shapes are the smallest powers of two that hold the rows.
"""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from moerl.rollout.hf.cache import Rows, SlotCache

PREFILL_TOKENS = 512
"""Of one prefill pass, over all its rows: enough to keep one CPU core's matrix units busy."""


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

    @torch.inference_mode()
    def prefill(self, slots: np.ndarray, chunks: Sequence[np.ndarray], starts: np.ndarray) -> torch.Tensor:
        """Next-token logits [n, vocab] after each chunk of at most prefill_chunk tokens; chunk i continues slots[i] at starts[i].

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
        kv_length = self._kv_length(int((starts + lengths).max()))
        hidden = self._run(ids, positions, used, _padded(slots, rows), kv_length)
        last = torch.from_numpy(np.maximum(_padded(lengths, rows) - 1, 0))
        return self._head(hidden[torch.arange(rows), last])[: len(slots)]

    @torch.inference_mode()
    def decode(self, slots: np.ndarray, tokens: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """Next-token logits [n, vocab] after `tokens` [n], which stand at `positions` [n] of `slots` [n]."""
        if self._deterministic:
            rows, at = self.cache.num_slots, slots
            row_slots = None
        else:
            rows, at = _bucket(len(slots), self.cache.num_slots), np.arange(len(slots))
            row_slots = _padded(slots, rows)
        ids, row_positions = np.zeros((2, rows, 1), dtype=np.int64)
        used = np.zeros((rows, 1), dtype=bool)
        ids[at, 0], row_positions[at, 0], used[at, 0] = tokens, positions, True
        hidden = self._run(ids, row_positions, used, row_slots, self._kv_length(int(positions.max()) + 1))
        return self._head(hidden[:, 0])[torch.from_numpy(at)]

    def _run(self, ids: np.ndarray, positions: np.ndarray, used: np.ndarray, slots: np.ndarray | None, kv_length: int) -> torch.Tensor:
        """Hidden states [B, C, hidden] of ids [B, C]. Where `used` is false, the token is padding."""
        write_at = torch.from_numpy(np.where(used, positions, self.cache.scratch_column))
        position_ids = torch.from_numpy(positions)
        self.cache.rows = Rows(slots=None if slots is None else torch.from_numpy(slots), write_at=write_at, kv_length=kv_length)
        return self._body(
            input_ids=torch.from_numpy(ids),
            position_ids=position_ids,
            attention_mask=self._mask(position_ids, kv_length),
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state

    def _mask(self, positions: torch.Tensor, kv_length: int) -> torch.Tensor:
        """[B, 1, groups * C, kv_length], 0 where a query sees a key and -inf elsewhere; see `cache.attend` for the axis of groups."""
        hidden = torch.arange(kv_length) > positions[..., None]
        mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, -torch.inf)
        return mask.repeat(1, self._query_groups, 1)[:, None]

    def _kv_length(self, needed: int) -> int:
        """The scratch column is never in it, so a pass reads finite numbers only."""
        limit = self.cache.scratch_column
        return limit if self._deterministic else _bucket(max(needed, 16), limit)


def _bucket(number: int, limit: int) -> int:
    """The smallest power of two that is at least `number`, or `limit`."""
    return min(1 << (number - 1).bit_length(), limit)


def _padded(values: np.ndarray, rows: int) -> np.ndarray:
    """int64 [rows]: `values`, then zeros."""
    return np.concatenate([values, np.zeros(rows - len(values), dtype=np.int64)]).astype(np.int64)
