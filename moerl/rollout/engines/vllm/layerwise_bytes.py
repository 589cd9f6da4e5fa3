"""Bytes that vLLM's loader put into its model, while the model is loaded anew layer by layer (vllm/model_executor/model_loader/reload).

vLLM keeps the tensors it is given until a layer has all of its own. Then it copies them into new memory in the checkpoint's layout, repacks
that if its kernels want another one, and copies the result to where the kernels read. Each tensor is compared when these copies are made:
with what the kernels read if that has the checkpoint's layout, and otherwise with what was repacked. The repacking itself shows in the
canary's log-probs only.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from moerl.rollout.engines.installed_bytes import Copies, CopyLog, LoadWeights, memory_of, read_back
from moerl.types.errors import WeightError
from moerl.weights.plan.tensor_specs import first_few


class LayerwiseBytes:
    """The `load` of a WeightSession."""

    def __init__(self, load_weights: LoadWeights):
        self._load_weights = load_weights
        self.begin()

    def begin(self) -> None:
        self._kept: dict[int, tuple[str, torch.Tensor]] = {}
        """Tensors that vLLM has not copied yet, by the address of their memory."""
        self._changed: list[str] = []

    def __call__(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The copy of `tensor` that vLLM got; `check` says whether it then installed that."""
        kept = tensor.clone(memory_format=torch.contiguous_format)
        self._kept[memory_of(kept)] = (name, kept)
        with self.watching():
            self._load_weights([(name, kept)])
        return kept

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Copies that vLLM makes inside are compared with what was sent."""
        with CopyLog() as log:
            yield
        self._compare([(target, source) for target, source in log.copies if not target.is_meta and not source.is_meta])

    def check(self) -> None:
        """WeightError for tensors that did not arrive as they were sent, or not at all."""
        absent = [name for name, kept in self._kept.values() if kept.numel()]
        for names, what in ((self._changed, "changed the bytes of"), (absent, "did not take, or not by a plain copy,")):
            if names:
                raise WeightError(
                    f"vLLM's loader {what} {len(names)} tensors: {first_few(names)}. It may not know the names, or convert what it loads; "
                    "engine arguments that change the weights' format are not supported"
                )

    def _compare(self, copies: Copies) -> None:
        installed: dict[int, Copies] = {}
        moves = [(target, source) for target, source in copies if memory_of(source) not in self._kept and _is_whole(source)]
        for target, source in copies:
            if memory_of(source) in self._kept:
                installed.setdefault(memory_of(source), []).append((_followed(target, moves), source))
        for address, parts in installed.items():
            name, kept = self._kept.pop(address)
            found = read_back(kept, parts)
            if any(part.dtype != kept.dtype for part, _ in parts) or not torch.equal(found.view(torch.uint8), kept.view(torch.uint8)):
                self._changed.append(name)


def _is_whole(source: torch.Tensor) -> bool:
    return source.untyped_storage().nbytes() == source.numel() * source.element_size()


def _followed(target: torch.Tensor, moves: Copies) -> torch.Tensor:
    """Memory to which `target` went when all of its memory was copied on, in the same layout; else `target`."""
    for moved, source in moves:
        same = (moved.shape, moved.stride(), moved.dtype) == (source.shape, source.stride(), source.dtype)
        if same and memory_of(source) == memory_of(target):
            target = moved.as_strided(target.shape, target.stride(), moved.storage_offset() + target.storage_offset())
    return target
