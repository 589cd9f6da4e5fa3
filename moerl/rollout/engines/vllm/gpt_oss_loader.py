"""vLLM's gpt-oss (vllm/model_executor/models/gpt_oss.py, 0.32) during a reload layer by layer, which sees what goes through the loaders of
parameters alone: the model's own copies stacks of experts and sinks past them."""

from collections.abc import Iterable
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from moerl.rollout.engines.installed_bytes import LoadWeights

_STACKS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")


def through_loaders(model: Any) -> LoadWeights:
    """The model's loader, which gets experts one by one, as it takes them through the loaders of their parameters."""
    load: LoadWeights = model.load_weights

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            block, _, kind = name.rpartition(".experts.")
            if kind in _STACKS:
                load([(f"{block}.experts.{expert}.{kind}", part) for expert, part in enumerate(tensor)])
            elif name.endswith(".self_attn.sinks"):
                sinks = model.get_parameter(name.replace(".self_attn.", ".attn."))
                first = get_tensor_model_parallel_rank() * len(sinks)
                sinks.weight_loader(sinks, tensor[first : first + len(sinks)])
            else:
                load([(name, tensor)])

    return load_weights
