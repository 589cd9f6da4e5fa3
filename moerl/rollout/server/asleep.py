"""What a server refuses while, or because, part of its memory is given back; the same for every engine. Empty: nothing."""

from collections.abc import Collection

from moerl.rollout.server.contract import MemoryPart


def sleep_refusal(parts: Collection[MemoryPart], num_running: int) -> str:
    if "cache" not in parts or num_running == 0:
        return ""
    return f"sleep with {num_running} running requests: their keys and values would be lost; pause(abort or wait) first"


def push_refusal(asleep: Collection[MemoryPart]) -> str:
    if "weights" not in asleep:
        return ""
    return "its weights are asleep: a push would have no memory to go to; wake them first"
