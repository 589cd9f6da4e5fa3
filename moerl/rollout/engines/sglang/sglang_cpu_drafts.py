"""Stand-ins that SGLang 0.5.23 needs to draft tokens where there is no GPU: kernels for a chain of drafts, sampling among them, and
attention over several new tokens of each request. On GPUs none of this is used.

SGLang's own path for CPU takes the likeliest token whatever the temperature, and attention kernels that need AMX.
"""

import ctypes
from types import ModuleType
from typing import Any

import torch

KERNELS = (
    "assign_draft_cache_locs_contiguous_cpu", "assign_extend_cache_locs_cpu", "fill_bonus_tokens_cpu", "fill_accept_out_cache_loc_cpu",
    "build_tree_kernel_efficient_cpu", "verify_tree_greedy_cpu", "assign_req_to_token_pool_cpu", "copy_all_layer_kv_cache_cpu",
)  # fmt: skip
"""Functions of this module by the names that SGLang imports from sgl_kernel."""


def prepare(kernels: ModuleType) -> None:
    """`kernels`: the stand-in for sgl_kernel, before sglang is imported."""
    for name in KERNELS:
        setattr(kernels, name, globals()[name])


def after_import() -> None:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.speculative import eagle_utils
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    torch.cuda.synchronize = lambda *_: None  # after a draft was given the model's embedding
    eagle_utils._verify_uses_greedy = lambda *, is_all_greedy, **_: is_all_greedy
    eagle_utils.tree_speculative_sampling_target_only = sample_chain
    eagle_utils.top_k_renorm_prob = _keep_largest
    TorchNativeAttnBackend.forward_extend = _over_drafts(TorchNativeAttnBackend.forward_extend)
    DraftBackendFactory.create_decode_backend = _steps_of
    DraftBackendFactory.create_draft_extend_backend = lambda factory: TorchNativeAttnBackend(factory.draft_model_runner)


# -- attention ---------------------------------------------------------------------------------------------------------------------


def _over_drafts(forward_extend: Any) -> Any:
    """Pass that checks drafts: each request has as many new tokens after those of `seq_lens`, in a chain."""

    def forward(backend: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not batch.forward_mode.is_target_verify():
            return forward_extend(backend, q, k, v, layer, batch, *args, **kwargs)
        before = batch.seq_lens, batch.extend_prefix_lens, batch.extend_seq_lens
        new = torch.full_like(batch.seq_lens, batch.spec_info.draft_token_num)
        batch.seq_lens, batch.extend_prefix_lens, batch.extend_seq_lens = batch.seq_lens + new, batch.seq_lens, new
        try:
            return forward_extend(backend, q, k, v, layer, batch, *args, **kwargs)
        finally:
            batch.seq_lens, batch.extend_prefix_lens, batch.extend_seq_lens = before

    return forward


class _Steps:
    """Attention of drafts after the first, each of which sees one token more (as IntelAMXMultiStepDraftBackend)."""

    def __init__(self, runner: Any, num_steps: int):
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        class Step(TorchNativeAttnBackend):
            def __init__(self, ahead: int):
                super().__init__(runner)
                self._ahead = ahead

            def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
                before = batch.seq_lens
                batch.seq_lens = batch.seq_lens + self._ahead
                try:
                    return super().forward_decode(q, k, v, layer, batch, *args, **kwargs)
                finally:
                    batch.seq_lens = before

        self.attn_backends = [Step(1 + step) for step in range(num_steps - 1)]

    def init_forward_metadata(self, batch: Any) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(batch)


def _steps_of(factory: Any) -> _Steps | None:
    return _Steps(factory.draft_model_runner, factory.speculative_num_steps) if factory.speculative_num_steps > 1 else None


# -- sampling ----------------------------------------------------------------------------------------------------------------------


def sample_chain(
    *, predicts: torch.Tensor, accept_index: torch.Tensor, accept_token_num: torch.Tensor, candidates: torch.Tensor,
    retrive_index: torch.Tensor, uniform_samples: torch.Tensor, uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor, **_: Any,
) -> None:  # fmt: skip
    """SGLang's tree_speculative_sampling_target_only for a chain and thresholds of 1: a draft is accepted with its probability by the
    model, and instead of the first that is not another token is drawn. What comes out is distributed as the model's own tokens.

    candidates, retrive_index, uniform_samples: [requests, drafts + 1]; target_probs: [requests, drafts + 1, vocabulary]. Written are
    predicts, flat; accept_index [requests, drafts + 1]; accept_token_num [requests], without the token that is no draft.
    """
    for row, probs in enumerate(target_probs):
        place, left = 0, probs[0]
        accept_index[row, 0] = retrive_index[row, 0]
        for draft in candidates[row, 1:].tolist():
            if uniform_samples[row, place] >= probs[place, draft]:
                left = probs[place].index_fill(0, torch.tensor(draft), 0.0)
                break
            predicts[retrive_index[row, place]] = draft
            place += 1
            accept_index[row, place] = retrive_index[row, place]
            left = probs[place]
        up_to = left.double().cumsum(0)
        drawn = torch.searchsorted(up_to, uniform_samples_for_final_sampling[row].double() * up_to[-1], right=True)
        predicts[retrive_index[row, place]] = drawn.clamp(max=int(left.nonzero().max())).to(predicts.dtype)
        accept_token_num[row] = place


def verify_tree_greedy_cpu(
    *, predicts: torch.Tensor, accept_index: torch.Tensor, accept_token_num: torch.Tensor, candidates: torch.Tensor,
    retrive_index: torch.Tensor, target_predict: torch.Tensor, **_: Any,
) -> None:  # fmt: skip
    """As `sample_chain`, at temperature 0. target_predict: [requests, drafts + 1]."""
    for row, likeliest in enumerate(target_predict.tolist()):
        drafts = candidates[row, 1:].tolist()
        place = next((index for index, draft in enumerate(drafts) if draft != likeliest[index]), len(drafts))
        reached = retrive_index[row, : place + 1]
        accept_index[row, : place + 1] = reached.to(accept_index.dtype)
        predicts[reached] = target_predict[row, : place + 1].to(predicts.dtype)
        accept_token_num[row] = place


def _keep_largest(probs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """[rows, vocabulary] -> the same, of each row's `top_k` largest alone."""
    ranks = probs.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    kept = probs.masked_fill(ranks >= top_k[:, None], 0.0)
    return kept / kept.sum(dim=-1, keepdim=True)


# -- kernels for a chain of drafts (sglang/kernels/ops/speculative) ----------------------------------------------------------------


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor, selected: torch.Tensor, seq_lens: torch.Tensor, tree_mask: torch.Tensor, positions: torch.Tensor,
    retrieve_index: torch.Tensor, next_token: torch.Tensor, next_sibling: torch.Tensor, topk: int, depth: int, num_tokens: int, *_: Any,
) -> None:  # fmt: skip
    """Each token's only child is the next one. The mask stays as it is: a chain is causal, and is not asked for it."""
    order = torch.arange(num_tokens)
    positions.copy_((seq_lens[:, None] + order).flatten())
    retrieve_index.copy_(torch.arange(retrieve_index.numel()).view_as(retrieve_index))
    next_token.copy_(torch.where(order + 1 < num_tokens, order + 1, -1).expand_as(next_token))


def assign_draft_cache_locs_contiguous_cpu(
    rows: torch.Tensor, req_to_token: torch.Tensor, seq_lens: torch.Tensor, out: torch.Tensor, pool_len: int, topk: int, num_columns: int
) -> None:
    columns = seq_lens.to(torch.int64)[:, None] + torch.arange(topk * num_columns)
    out.copy_(req_to_token[rows.to(torch.int64)[:, None], columns].flatten())


def assign_extend_cache_locs_cpu(
    rows: torch.Tensor, req_to_token: torch.Tensor, begins: torch.Tensor, ends: torch.Tensor, out: torch.Tensor, pool_len: int
) -> None:
    taken = [req_to_token[row, begin:end] for row, begin, end in zip(rows.tolist(), begins.tolist(), ends.tolist(), strict=True)]
    places = torch.cat(taken)
    out[: len(places)] = places.to(out.dtype)


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor, req_to_token: torch.Tensor, begins: torch.Tensor, ends: torch.Tensor, places: torch.Tensor, pool_len: int
) -> None:
    first = 0
    for row, begin, end in zip(rows.tolist(), begins.tolist(), ends.tolist(), strict=True):
        req_to_token[row, begin:end] = places[first : first + end - begin].to(req_to_token.dtype)
        first += end - begin


def fill_bonus_tokens_cpu(accepted: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor, stride: int) -> None:
    out.copy_(accepted.flatten()[torch.arange(len(lengths)) * stride + lengths - 1])


def fill_accept_out_cache_loc_cpu(accept_index: torch.Tensor, places: torch.Tensor, out: torch.Tensor) -> None:
    found = places[accept_index[accept_index > -1].to(torch.int64)]
    out[: len(found)] = found


# -- kernel for caches of heads' keys and values (sglang/kernels/ops/kvcache/cache_move.py), which latent attention has none of ----------


def copy_all_layer_kv_cache_cpu(addresses: torch.Tensor, sizes: torch.Tensor, targets: torch.Tensor, sources: torch.Tensor) -> None:
    """Positions `sources` of every cache to its positions `targets`; SGLang does it once as it starts. `addresses`, `sizes`: of each cache,
    and of a position in it, in bytes."""
    for address, size in zip(addresses.tolist(), sizes.tolist(), strict=True):
        moved = [ctypes.string_at(address + size * source, size) for source in sources.tolist()]
        for target, position in zip(targets.tolist(), moved, strict=True):
            ctypes.memmove(address + size * target, position, size)
