"""On-policy distillation: log-probs of every response token by its teacher, which the policy is to come near."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from moerl.companions.companion import Companion, plain
from moerl.config.schema.companion_config import DistillationConfig
from moerl.train.group import MegatronTrainGroup
from moerl.types.batch import StoredBatch
from moerl.types.errors import DataError
from moerl.types.groups import Prompt, Sample
from moerl.types.stored import Stored, StoredCompletion, Stream, keep

_STREAMS: frozenset[Stream] = frozenset({"kl"})
_ITSELF = ""
"""Name of the policy that teaches itself."""


class Teaching:
    def __init__(self, config: DistillationConfig, policy: MegatronTrainGroup, companions: Mapping[str, Companion]):
        """The policy is awake whenever it is asked."""
        self._config, self._policy, self._companions = config, policy, companions
        self._of_source = {source: name for name, teacher in config.teachers.items() for source in teacher.data_sources}
        self._of_others = next((name for name, teacher in config.teachers.items() if not teacher.data_sources), None)
        if self._of_others is None and config.shown is not None:
            self._of_others = _ITSELF

    async def taught(self, batch: StoredBatch, segments: Sequence[tuple[Prompt, Sample, StoredCompletion]]) -> StoredBatch:
        """With log-probs and weights. `segments`: its sequences. DataError for one without a teacher and anything else to learn from."""
        teachers = [self._teacher(*segment) for segment in segments]
        logprobs_T = np.zeros(int(batch.offsets[-1]), dtype=np.float32)
        for name in sorted({teacher for teacher in teachers if teacher is not None}):
            sequences = np.array([index for index, teacher in enumerate(teachers) if teacher == name], dtype=np.int64)
            asked = replace(plain(batch), streams=batch.streams & _STREAMS).select(sequences)  # of what is taught beside the response too
            if name == _ITSELF:
                asked = _with_prompts(asked, [segments[index][0].shown_ids for index in sequences])
                found = await self._policy.logprobs(asked)
            else:
                async with self._companions[f"teacher-{name}"].awake() as group:
                    found = await group.logprobs(asked)
            await asyncio.to_thread(_place, found, asked, logprobs_T, batch, sequences)
        weights = np.array([0.0 if teacher is None else self._config.weight for teacher in teachers], dtype=np.float32)
        kept = await asyncio.to_thread(keep, logprobs_T)
        return replace(batch, teacher_logprobs=kept, kl_weights=weights, streams=batch.streams.union(_STREAMS))

    def _teacher(self, prompt: Prompt, sample: Sample, segment: StoredCompletion) -> str | None:
        name = self._of_source.get(prompt.data_source, self._of_others)
        who = f"prompt {prompt.index} ({prompt.data_source})"
        if name is None and "kl" in segment.streams:
            raise DataError(
                f"{who}: its samples have weights of a distance from a teacher, and it has none: leave kl out of Payload.weights"
            )
        if name == _ITSELF and (sample.earlier or segment.num_prompt != len(prompt.token_ids)):
            raise DataError(f"{who}: distillation.shown is for answers to the prompt itself, and a sample has turns between")
        if name is None and not self._config.trains_rewards:
            named = ", ".join(sorted(self._of_source))
            raise DataError(
                f"{who}: distillation.teachers name {named} and no others: nothing would be learned "
                "from it; a teacher without data_sources takes all others, or distillation.trains_rewards=true"
            )
        return name


def refuse_weights(batch: StoredBatch) -> None:
    """DataError for weights of a distance where nobody teaches."""
    if "kl" in batch.streams:
        raise DataError("samples have weights of a distance from a teacher, and there is none: leave kl out of Payload.weights")


def _with_prompts(batch: StoredBatch, prompts: Sequence[tuple[int, ...]]) -> StoredBatch:
    return replace(batch, prompts=tuple(prompts), prompt_lengths=np.array([len(prompt) for prompt in prompts], dtype=np.int64))


def _place(found: Stored[np.ndarray], asked: StoredBatch, logprobs_T: np.ndarray, batch: StoredBatch, sequences: np.ndarray) -> None:
    """Put those of responses where they stand in `batch`, of which `asked` has the `sequences`, perhaps after other prompts."""
    found_T, ends, own_ends = found.get(), batch.offsets[1:], asked.offsets[1:]
    responses = (batch.lengths - batch.prompt_lengths)[sequences]
    for sequence, length, own_end in zip(sequences.tolist(), responses.tolist(), own_ends.tolist(), strict=True):
        logprobs_T[ends[sequence] - length : ends[sequence]] = found_T[own_end - length : own_end]
