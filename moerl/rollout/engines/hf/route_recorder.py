"""Which experts the routers of a transformers model choose, as its forward passes run."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from transformers import PreTrainedModel

from moerl.models.families.family_table import FAMILIES
from moerl.types.routes import RouteShape


class RouteRecorder:
    """Costs nothing but while it records."""

    def __init__(self, model: PreTrainedModel, shape: RouteShape | None):
        """`shape` None: a dense model, of which there is nothing to record."""
        router = f".mlp.{FAMILIES[model.config.model_type].served.router}"
        self._gates = [module for name, module in model.named_modules() if name.endswith(router)]
        self._shape = shape
        expected = 0 if shape is None else shape.num_layers
        assert len(self._gates) == expected, f"{len(self._gates)} routers in a model with {expected} layers of experts"

    @contextmanager
    def recording(self) -> Iterator[list[torch.Tensor]]:
        """The list gets [tokens of the pass, top_k] of every layer with experts, in order."""
        chosen: list[torch.Tensor] = []
        # A router returns logits, weights and experts (transformers, models/qwen3_moe and deepseek_v3, TopKRouter).
        hooks = [gate.register_forward_hook(lambda _, __, output: chosen.append(output[2])) for gate in self._gates]
        try:
            yield chosen
        finally:
            for hook in hooks:
                hook.remove()

    def table(self, chosen: list[torch.Tensor], rows: int) -> np.ndarray:
        """Routes that were recorded in one pass over `rows` rows: [rows, tokens per row, layers, top_k]."""
        assert self._shape is not None
        shape = (rows, -1, self._shape.num_layers, self._shape.top_k)
        return torch.stack(chosen, dim=1).numpy().astype(self._shape.dtype).reshape(shape)
