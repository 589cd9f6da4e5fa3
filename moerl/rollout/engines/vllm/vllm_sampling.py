"""vLLM's sampler in the terms of SamplingParams: log-probs at the temperature, and random numbers that follow those a completion has used.

`activate` replaces functions of vLLM 0.32's first model runner, in the process that holds the model.
"""

from threading import Event
from typing import Any

import torch
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_input_batch import InputBatch

NUM_DRAWN = "num_drawn"
"""Name of SamplingParams.num_drawn in extra_args of vLLM's SamplingParams."""

saw_nan = Event()
"""Log-probs were not numbers, on CPU; whoever cleans up clears it."""

_GREEDY_BELOW = 1e-5  # vllm/v1/sample/sampler.py

_forward, _add_request = Sampler.forward, InputBatch.add_request


def activate() -> None:
    Sampler.forward, InputBatch.add_request = _forward_at_temperature, _add_request_with_numbers
    if not torch.cuda.is_available():
        rejection_sampler.expand_batch_to_tokens = _expanded


def _forward_at_temperature(sampler: Any, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
    """vLLM reports log-probs at temperature 1 (raw) or after top-k and top-p (processed)."""
    temperature = sampling_metadata.temperature

    def compute_logprobs(raw: torch.Tensor) -> torch.Tensor:
        # Greedy rows have temperature 0 and are reported at 1; None: all are greedy.
        # Where drafts are checked, a request has as many rows as it can get tokens (RejectionSampler._get_logprobs_tensors).
        divisor: Any = 1.0
        if temperature is not None:
            at_least = torch.where(temperature < _GREEDY_BELOW, 1.0, temperature)
            divisor = at_least.repeat_interleave(len(raw) // len(temperature))[:, None]
        logprobs = (raw.float() / divisor).log_softmax(dim=-1)
        if logprobs.device.type == "cpu" and logprobs.isnan().any():
            saw_nan.set()
        return logprobs

    sampler.compute_logprobs = compute_logprobs
    return _forward(sampler, logits, sampling_metadata, *args, **kwargs)


def _expanded(
    per_request: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """[requests] -> [num_tokens]: each value as often as its request has drafts. vLLM's own on CPU leaves memory that is not of integers
    unwritten (_expand_kernel_impl in utils/cpu_triton_utils.py), and a random number would divide the logits."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    found = per_request.repeat_interleave(counts.to(torch.int64), output_size=num_tokens)
    return torch.where(found == replace_from, replace_to, found) if replace_from != replace_to else found


def _add_request_with_numbers(batch: Any, request: Any) -> int:
    """vLLM seeds a generator for each request; it comes here again after the request was preempted."""
    sampling = request.sampling_params
    num_drawn = 0 if sampling is None or not sampling.extra_args else sampling.extra_args.pop(NUM_DRAWN, 0)
    if num_drawn and request.generator is not None:  # greedy requests have none
        advance(request.generator, num_drawn, batch.vocab_size)
    return _add_request(batch, request)


def advance(generator: torch.Generator, num_tokens: int, vocab_size: int) -> None:
    """Bring `generator` to its state after it has drawn `num_tokens` tokens (TopKTopPSampler.forward_cpu, forward_native)."""
    if generator.device.type == "cpu":
        torch.randint(0, 2**31, (num_tokens,), generator=generator, dtype=torch.long)
        return
    first = generator.get_offset()
    torch.empty(vocab_size, device=generator.device).exponential_(generator=generator)
    generator.set_offset(first + num_tokens * (generator.get_offset() - first))
