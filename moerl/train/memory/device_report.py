"""Memory of this rank's GPU and process as they are: the peaks of an update, and what was where when the GPU was full."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import psutil
import torch
from megatron.core import parallel_state

from moerl.train.memory.memory_states import Bytes, Call, Kind
from moerl.types.errors import OutOfDeviceMemory

GIB = 2**30


def begin_peaks() -> None:
    """Forget those of before."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peaks() -> dict[str, int]:
    """Bytes since `begin_peaks`: allocated and reserved by PyTorch; used on the GPU now, by all processes; of this process in host memory
    now. Without a GPU the last alone."""
    found = {"process": psutil.Process().memory_info().rss}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        found |= {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved(), "used": total - free}
    return found


@contextmanager
def told_when_full(call: Call, held: Callable[[], Mapping[Kind, Bytes]], model: str = "policy") -> Iterator[None]:
    """Context in which CUDA's lack of memory becomes OutOfDeviceMemory, with what was on the GPU. `held`: what is known by kind, of
    `model`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise _full(call, held(), model, error) from error


def _full(call: Call, held: Mapping[Kind, Bytes], model: str, error: torch.OutOfMemoryError) -> OutOfDeviceMemory:
    found = {("weights" if kind == "parameters" else str(kind)): each.device for kind, each in held.items()}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        found["all else allocated"] = allocated - sum(found.values())
        found["between allocations"] = reserved - allocated
        found["outside of PyTorch"] = total - free - reserved
    sizes = ", ".join(f"{kind} {size / GIB:.3g}" for kind, size in found.items() if size)
    whose = "" if model == "policy" else f" of {model}"
    full = OutOfDeviceMemory(f"the GPU is full in {call}{whose}. On it, in GiB: {sizes}. {str(error).splitlines()[0]}")
    full.held, full.call, full.model, full.stage = found, call, model, parallel_state.get_pipeline_model_parallel_rank()
    return full
