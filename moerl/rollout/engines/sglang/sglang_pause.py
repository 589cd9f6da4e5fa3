"""Pauses of SGLang's scheduler (in_place, 0.5.23) that a push may take its time for.

Its loop for GPUs has always launched one batch whose tokens it has not taken yet, and a pause leaves that batch as it is.
"""

from collections.abc import Iterator
from typing import Any


def prepare() -> None:
    """Patches SGLang in this process, once it is there."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.runtime_context import get_serving
    from sglang.srt.utils.weight_versions import WeightVersionEvent

    pause, change = Scheduler.pause_generation, Scheduler.record_weight_version_change

    def pause_generation(scheduler: Any, request: Any) -> None:
        pause(scheduler, request)
        scheduler.cur_batch_for_debug = None  # its watchdog would take a pause for a batch that hangs, and end the server
        for _, result in _launched(scheduler):
            if result.copy_done is not None:
                result.copy_done.synchronize()  # weights may change once it has been computed

    def record_weight_version_change(scheduler: Any, new_version: str | None) -> None:
        """SGLang counts the tokens it has taken; those of the launched batch are of the old weights too."""
        old = get_serving().weight_version
        change(scheduler, new_version)
        for request, count in _not_taken(scheduler):
            event = WeightVersionEvent(old_version=old, num_output_tokens=len(request.output_ids) + count)
            request.weight_version_events.append(event)

    Scheduler.pause_generation = pause_generation
    Scheduler.record_weight_version_change = record_weight_version_change


def _launched(scheduler: Any) -> Any:
    """Batches, each with its result."""
    return getattr(scheduler, "result_queue", ())


def _not_taken(scheduler: Any) -> Iterator[tuple[Any, int]]:
    """Requests of launched batches, each with the number of its tokens there; with drafts of those that were accepted."""
    for batch, result in _launched(scheduler):
        counts = [1] * len(batch.reqs) if result.accept_lens is None else result.accept_lens.tolist()
        for request, count in zip(batch.reqs, counts, strict=True):
            if not (request.finished() or request.is_retracted or request.inflight_middle_chunks > 0):
                yield request, count
