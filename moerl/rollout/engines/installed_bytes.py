"""Bytes that an engine's own loader put into its model.

Engines fuse and cut tensors as they load them (q, k and v in one parameter, a rank's share of an expert). The loader knows where every
element goes: it is asked with a tensor that has no memory, and the copies that it would make are noted and not made. Pieces then go there
as they come, and are compared there. A loader that does more than copy gets the tensor whole, and the copies it makes are noted. A
parameter that no copy reached has values of its own, which no digest of what was sent can show.
"""

import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from moerl.models.fp8_blocks import round_up_to_power_of_two
from moerl.models.fp8_names import SCALE_SUFFIX
from moerl.types.errors import WeightError
from moerl.types.push import TensorSpec
from moerl.weights.plan.spec_tensors import torch_dtype
from moerl.weights.plan.tensor_specs import first_few
from moerl.weights.verify.places import Place, Start, copy_piece, places_of

logger = logging.getLogger(__name__)

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
"""An engine's loader, e.g. a model's load_weights."""

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def with_draft(load: LoadWeights, load_draft: LoadWeights, num_layers: int) -> LoadWeights:
    """Loader of a model of `num_layers`, and of the one that drafts: its are the layers after the model's last."""

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            layer = _LAYER.match(name)
            (load if layer is None or int(layer[1]) < num_layers else load_draft)([(name, tensor)])

    return load_weights


class InstalledBytes:
    """`load` and `takes_whole` of a WeightSession's loader, for a model with a `load_weights` that copies at once."""

    def __init__(self, load_weights: LoadWeights, specs: Mapping[str, TensorSpec]):
        """`specs`: of what a push brings, by name."""
        self._load_weights, self._specs = load_weights, specs
        self._reached: set[int] = set()
        self._places: dict[str, list[Place]] = {}

    def begin(self) -> None:
        """Forget which parameters were reached, and where: they may have other memory in the next push."""
        self._reached.clear()
        self._places.clear()

    def check_reached(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """WeightError for those of the model's parameters, by name, that got nothing since `begin`. When everything has come: where it
        went is forgotten, as engines free some of that memory after a push."""
        self._places.clear()
        refuse_missed([name for name, parameter in parameters if parameter.numel() and memory_of(parameter) not in self._reached])

    def takes_whole(self, name: str) -> bool:
        """Whether the loader must have this tensor's values, and not only its shape, to put it into the model."""
        if name not in self._places:
            spec = self._specs[name]
            asked = torch.empty(spec.shape, dtype=torch_dtype(spec), device="meta")
            try:
                self._places[name] = self._load(name, asked)
            except Exception as error:  # the engine's own code, which was not written for such a tensor
                logger.info("tensor %r is loaded whole, as the engine's loader does more than copy: %r", name, error)
                self._places[name] = []
        return not self._places[name]

    def __call__(self, name: str, start: Start, piece: torch.Tensor) -> list[Place]:
        """Where this process holds something of the tensor."""
        if self.takes_whole(name):
            places = self._load(name, piece)
        else:
            places = self._places[name]
            copy_piece(places, start, piece)
        self._reached.update(memory_of(place.target) for place in places)
        return places

    def _load(self, name: str, tensor: torch.Tensor) -> list[Place]:
        with CopyLog(makes_none=tensor if tensor.is_meta else None) as log:
            self._load_weights([(name, tensor)])
        copies = [(target, source) for target, source in log.copies if not target.is_meta and _is_of(source, tensor)]
        if not copies:
            raise WeightError(
                f"tensor {name!r}: the engine's loader took nothing of it, or not by a plain copy. It may not know the name, or quantize "
                "what it loads; engine arguments that change the weights' format are not supported"
            )
        return [place for target, source in copies for place in places_of(target, source, tensor)]


def refuse_missed(names: Collection[str]) -> None:
    """WeightError for parameters of an engine's model that no copy reached, if there are any."""
    if names:
        raise WeightError(
            f"{len(names)} parameters of the engine's model got nothing of the push: {first_few(names)}. It has more of them than "
            "the checkpoint, or its loader lost some; it would compute with values nobody sent"
        )


def check_powers_of_two(name: str, tensor: torch.Tensor, engine: str) -> None:
    """WeightError for scales of a push that DeepGEMM's kernels could only take rounded up, and the values rounded once more with them."""
    if name.endswith(SCALE_SUFFIX) and not tensor.equal(round_up_to_power_of_two(tensor)):
        raise WeightError(
            f"tensor {name!r}: {engine}'s kernels on this GPU take scales that are powers of two (UE8M0), and it would round these, and "
            "the values with them; name the GPU of the servers as placement.gpu, and they are made so"
        )


Copies = list[tuple[torch.Tensor, torch.Tensor]]
"""Target and source."""


def memory_of(tensor: torch.Tensor) -> int:
    """The address of the storage it is a view of."""
    return tensor.untyped_storage().data_ptr()


class CopyLog(TorchFunctionMode):
    """Every `target.copy_(source)` and `target[...] = source` of this thread while it is entered. The source of what was made contiguous,
    a transposed tensor say, is the tensor that it was made of."""

    def __init__(self, *, makes_none: torch.Tensor | None = None) -> None:
        """`makes_none`: a tensor on meta, of which no copies are made."""
        super().__init__()
        self.copies: Copies = []
        self._makes_none = makes_none
        self._contiguous: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Contiguous tensors and what they were made of, by their storage, which is kept from others thereby."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        copy = None
        if func is torch.Tensor.copy_ and isinstance(args[1], torch.Tensor):
            copy = (args[0].detach(), self._origin(args[1]))
        elif func is torch.Tensor.__setitem__ and isinstance(args[2], torch.Tensor):
            copy = (args[0].detach()[args[1]], self._origin(args[2]))
        if copy is not None:
            self.copies.append(copy)
            if self._makes_none is not None and _is_of(copy[1], self._makes_none):
                return args[0]
        found = func(*args, **(kwargs or {}))
        if func is torch.Tensor.contiguous and not _is_of(found, args[0]):
            self._contiguous[_storage(found)] = (found, args[0].detach())
        return found

    def _origin(self, source: torch.Tensor) -> torch.Tensor:
        made, origin = self._contiguous.get(_storage(source), (source, source))
        return (origin if made.shape == source.shape else source).detach()


def _is_of(view: torch.Tensor, tensor: torch.Tensor) -> bool:
    return _storage(view) == _storage(tensor)


def _storage(tensor: torch.Tensor) -> int:
    """Tells storages apart, also on meta, where none has an address."""
    return int(tensor.untyped_storage()._cdata)
