"""Parts of the scheduler of SGLang (0.5.23) that moerl replaces: pauses that a push may take its time for, seeds, records of routes.

Its loop for GPUs has always launched one batch whose tokens it has not taken yet, and a pause in place leaves that batch as it is.
"""

import logging
from collections.abc import Iterator
from typing import Any

import torch


def prepare(*, records_routes: bool) -> None:
    """Patches SGLang in this process, once it is there."""
    from sglang.srt.layers.moe import topk
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.models.deepseek_common import deepseek_weight_loader
    from sglang.srt.runtime_context import get_serving
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.utils.weight_versions import WeightVersionEvent

    pause, change = Scheduler.pause_generation, Scheduler.record_weight_version_change

    def pause_generation(scheduler: Any, request: Any) -> None:
        pause(scheduler, request)
        scheduler.cur_batch_for_debug = None  # its watchdog would take a pause for a batch that hangs, and end the server
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the launched batch is computed on a stream of its own, which copies of a push do not wait for

    def record_weight_version_change(scheduler: Any, new_version: str | None) -> None:
        """SGLang counts the tokens it has taken; those of the launched batch are of the old weights too."""
        old = get_serving().weight_version
        change(scheduler, new_version)
        for request, count in _not_taken(scheduler):
            event = WeightVersionEvent(old_version=old, num_output_tokens=len(request.output_ids) + count)
            request.weight_version_events.append(event)

    Scheduler.pause_generation = pause_generation
    Scheduler.record_weight_version_change = record_weight_version_change
    SamplingBatchInfo.adjusted_from_schedule_batch = _add_seeds  # SGLang's place for this
    deepseek_weight_loader.should_async_load = lambda weight: False  # InstalledBytes notes the copies of its own thread
    if records_routes:
        # SGLang's kernels for Blackwell (flashinfer_trtllm, its own choice there) would choose experts by themselves, and its record of
        # routes be zeros. They take experts that were chosen before as well.
        topk._can_bypass_trtllm_routing = lambda config: False
    logging.getLogger(Scheduler.__module__).addFilter(_has_no_body)


def _not_taken(scheduler: Any) -> Iterator[tuple[Any, int]]:
    """Requests of launched batches, each with the number of its tokens there; with drafts of those that were accepted."""
    for batch, result in getattr(scheduler, "result_queue", ()):
        counts = [1] * len(batch.reqs) if result.accept_lens is None else result.accept_lens.tolist()
        for request, count in zip(batch.reqs, counts, strict=True):
            if not (request.finished() or request.is_retracted or request.inflight_middle_chunks > 0):
                yield request, count


def _add_seeds(info: Any, batch: Any, vocab_size: int) -> None:
    """SGLang hands requests' seeds to its sampler in its deterministic mode only, which restricts the attention kernels and slows them."""
    seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
    if info.sampling_seed is None and None not in seeds:
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=batch.device)


def _has_no_body(record: logging.LogRecord) -> bool:
    """SGLang logs the arguments of a call in full, here every tensor of a push."""
    return not (record.funcName == "handle_rpc_request" and record.levelno == logging.INFO)
