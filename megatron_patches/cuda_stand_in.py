"""torch.cuda for a machine without CUDA: the entry points Megatron-Core calls, answered by the CPU.

What breaks: Megatron-Core calls torch.cuda (current_device, streams, events, RNG state) and asks for device="cuda" in
about 150 places. Versions: every megatron-core. Upstream: none planned. Can go: when Megatron-Core asks its config for the device.
One stream: everything is in order, so events and waits are empty.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._device

NAME = "cuda_stand_in"
CPU = torch.device("cpu")
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint", "as_tensor", "zeros_like", "empty_like",
              "ones_like", "full_like", "linspace", "eye")  # fmt: skip
_MARK = "_moerl_cuda_stand_in"


def needed() -> bool:
    return not torch.cuda.is_available()


def active() -> bool:
    return bool(getattr(torch.cuda.current_device, _MARK, False))


class Event:
    """Everything before it has happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "Event") -> float:
        return 0.0


class Stream:
    """The one stream."""

    cuda_stream = 0
    device = CPU

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        return Event() if event is None else event

    def query(self) -> bool:
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, -1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None: ...


def apply() -> None:
    if "megatron.core" in sys.modules:
        raise RuntimeError("megatron_patches.activate() must run before megatron.core is imported: it binds torch.cuda names at import")
    _answer_devices_and_streams()
    _answer_rng()
    _redirect_tensors()
    _redirect_factories()


def _answer_devices_and_streams() -> None:
    cuda: Any = torch.cuda
    the_stream = Stream()

    def current_device() -> torch.device:
        return CPU

    @contextlib.contextmanager
    def stream(_: Any) -> Iterator[None]:
        yield

    setattr(current_device, _MARK, True)
    cuda.current_device = current_device
    for name in ("set_device", "synchronize", "empty_cache", "ipc_collect", "_lazy_init"):
        setattr(cuda, name, _nothing())
    cuda.Stream, cuda.Event, cuda.stream = Stream, Event, stream
    cuda.current_stream = lambda device=None: the_stream
    cuda.default_stream = lambda device=None: the_stream
    cuda.is_current_stream_capturing = lambda: False
    cuda.nvtx.range_push, cuda.nvtx.range_pop = _nothing(), _nothing()
    # Without triton torch.compile would fail at the first call; Megatron compiles only for speed.
    torch.compile = lambda model=None, *_, **__: model if model is not None else (lambda f: f)  # type: ignore[assignment]


def _nothing() -> Callable[..., None]:
    """A new function each time: torch._dynamo refuses one object under two names of torch."""
    return lambda *_, **__: None


def _answer_rng() -> None:
    cuda: Any = torch.cuda

    def get_rng_state(device: Any = "cuda") -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(state: torch.Tensor, device: Any = "cuda") -> None:
        torch.set_rng_state(state)

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(int(seed))

    class Generators:
        def __getitem__(self, index: int) -> torch.Generator:
            return torch.default_generator

    cuda.get_rng_state = cuda.random.get_rng_state = get_rng_state
    cuda.set_rng_state = cuda.random.set_rng_state = set_rng_state
    cuda.manual_seed = cuda.random.manual_seed = cuda.manual_seed_all = manual_seed
    cuda.default_generators = Generators()
    cuda._lazy_call = lambda callback, **_: callback()


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


def _redirect_tensors() -> None:
    tensor: Any = torch.Tensor
    real_to, real_type = torch.Tensor.to, torch.Tensor.type

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and _is_cuda(args[0]):
            args = (CPU, *args[1:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return real_to(self, *args, **kwargs)

    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        answer = real_type(self, dtype, *args, **kwargs)
        # Megatron's optimizer and DDP sort parameters by the names of CUDA tensor types; nobody else may see them.
        if dtype is None and "/megatron/core/" in sys._getframe(1).f_code.co_filename:
            # Its distributed optimizer knows full precision under one name only; float64 parameters are handled like float32 ones.
            return answer.replace("torch.", "torch.cuda.", 1).replace("Double", "Float")
        return answer

    tensor.to, tensor.type = to, type_
    tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[assignment]
    tensor.pin_memory = lambda self, *_, **__: self
    tensor.record_stream = _nothing()


def _redirect_factories() -> None:
    def on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = CPU
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
            return factory(*args, **kwargs)

        make.__name__ = factory.__name__
        return make

    # `with torch.device(...)` looks for factories in a set that torch makes once: it must hold those that the new ones call.
    torch.utils._device._device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))
