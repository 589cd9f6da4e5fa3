"""A completion as the collector of an engine inside the process keeps it."""

from collections.abc import Sequence

from moerl.types.completion import Completion
from moerl.types.stored import Here, Payload, StoredCompletion


def stored_here(prompt_ids: Sequence[int], completion: Completion, text: str = "") -> StoredCompletion:
    payload = Payload.of(prompt_ids, completion, text)
    return StoredCompletion.of(completion, payload, Here(payload))
