"""Bytes that an engine's own loader put into its model.

Engines fuse and cut tensors as they load them (q, k and v in one parameter, a rank's share of an expert). So that the bytes in the
model can be compared with those that were sent, the copies the loader makes are noted while it runs, and read back through. A parameter
that no copy reached has values of its own, which no digest of what was sent can show.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from moerl.types.errors import WeightError
from moerl.weights.plan.tensor_specs import first_few

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
"""An engine's loader, e.g. a model's load_weights."""


class InstalledBytes:
    """The `load` of a WeightSession, for a model with a `load_weights`."""

    def __init__(self, load_weights: LoadWeights):
        self._load_weights = load_weights
        self._reached: set[int] = set()

    def begin(self) -> None:
        """Forget which parameters were reached."""
        self._reached.clear()

    def check_reached(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """WeightError for those of the model's parameters, by name, that got nothing since `begin`."""
        missed = [name for name, parameter in parameters if parameter.numel() and memory_of(parameter) not in self._reached]
        if missed:
            raise WeightError(
                f"{len(missed)} parameters of the engine's model got nothing of the push: {first_few(missed)}. It has more of them than "
                "the checkpoint, or its loader lost some; it would compute with values nobody sent"
            )

    def __call__(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` as the model holds it: the parts this rank has taken are read back, the others are as they were sent."""
        with CopyLog() as log:
            self._load_weights([(name, tensor)])
        copies = [(target, source) for target, source in log.copies if not target.is_meta and memory_of(source) == memory_of(tensor)]
        if not copies:
            raise WeightError(
                "the engine's loader took nothing of it, or not by a plain copy. It may not know the name, or quantize what it loads; "
                "engine arguments that change the weights' format are not supported"
            )
        self._reached.update(memory_of(target) for target, _ in copies)
        if len(copies) == 1 and copies[0][0].numel() == tensor.numel():
            return copies[0][0].view(tensor.shape) if copies[0][0].is_contiguous() else copies[0][0].reshape(tensor.shape)
        return read_back(tensor, copies)


Copies = list[tuple[torch.Tensor, torch.Tensor]]
"""Target and source."""


def read_back(tensor: torch.Tensor, copies: Copies) -> torch.Tensor:
    """`tensor`, with what now lies where parts of it were copied to."""
    whole = tensor.clone(memory_format=torch.contiguous_format)
    for target, source in copies:
        offset = source.storage_offset() - tensor.storage_offset() * tensor.element_size() // source.element_size()
        whole.as_strided(source.shape, source.stride(), offset).copy_(target.reshape(source.shape))
    return whole


def memory_of(tensor: torch.Tensor) -> int:
    """The address of the storage it is a view of."""
    return tensor.untyped_storage().data_ptr()


class CopyLog(TorchFunctionMode):
    """Every `target.copy_(source)` and `target[...] = source` of this thread while it is entered. The source of what was made contiguous,
    a transposed tensor say, is the tensor that it was made of."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: Copies = []
        self._contiguous: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Contiguous tensors and what they were made of, by the address of their memory, which is kept from others thereby."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.Tensor.copy_ and isinstance(args[1], torch.Tensor):
            self.copies.append((args[0].detach(), self._origin(args[1])))
        elif func is torch.Tensor.__setitem__ and isinstance(args[2], torch.Tensor):
            self.copies.append((args[0].detach()[args[1]], self._origin(args[2])))
        found = func(*args, **(kwargs or {}))
        if func is torch.Tensor.contiguous and memory_of(found) != memory_of(args[0]):
            self._contiguous[memory_of(found)] = (found, args[0].detach())
        return found

    def _origin(self, source: torch.Tensor) -> torch.Tensor:
        made, origin = self._contiguous.get(memory_of(source), (source, source))
        return (origin if made.shape == source.shape else source).detach()
