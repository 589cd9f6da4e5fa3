"""What a server refuses while, or because, part of its memory is given back; the same for every engine. Empty: nothing."""

from collections.abc import Collection

from moerl.rollout.engine import Part


def sleep_refusal(parts: Collection[Part], num_running: int) -> str:
    if "cache" not in parts or num_running == 0:
        return ""
    return f"sleep with {num_running} running requests: their keys and values would be lost; pause(abort or wait) first"


def push_refusal(asleep: Collection[Part]) -> str:
    if "weights" not in asleep:
        return ""
    return "its weights are asleep: a push would have no memory to go to; wake them first"
