"""What ranks of a run hold, built by Megatron on Transformer Engine's own Python: `te_ranks.py FOLDER recipe=NAME ...`.

FOLDER is where the distribution was unpacked, or `reference`. Prints the names and shapes of parameters by stage, as JSON. Nothing of the
distribution is replaced but what is compiled and the export to ONNX; on meta tensors no layer computes. What is built is a rank of an H100.
"""

import importlib
import importlib.machinery
import json
import os
import sys
import types
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch

FUSIONS = (
    "bias_activation_fusion", "apply_rope_fusion", "moe_permute_fusion", "gradient_accumulation_fusion", "moe_router_fusion",
    "masked_softmax_fusion",
)  # fmt: skip
"""Fields of Megatron's TransformerConfig."""


class Named(type):
    """A compiled class or enum: its members are those that are asked for, each with a number of its own."""

    members: dict[str, object]

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        members = cls.__members__
        if name not in members:
            members[name] = made = object.__new__(cls)
            made.value = len(members)
        return members[name]

    @property
    def __members__(cls):
        return cls.__dict__["of_class"]


class Compiled(types.ModuleType):
    """A compiled module: every class and function is there; none can be called."""

    def __init__(self, name):
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            to_int = {"__int__": lambda self: self.value, "__index__": lambda self: self.value, "of_class": {}}
            found = Named(name, (object,), to_int)
        else:

            def found(*_, **__):
                raise RuntimeError(f"{name} is compiled")

        setattr(self, name, found)
        return found


@contextmanager
def defined_kernels():
    """Inside, kernels of Triton, which has no distribution without CUDA, can be defined: none is compiled or called."""
    importlib.import_module("torch._inductor.utils")  # it asks for Triton when it is first imported, and believes what it finds

    names = ("triton", "triton.language", "triton.language.core", "triton.language.standard")
    for name in names:
        made = sys.modules[name] = Compiled(name)
        made.__path__ = []
        if "." in name:
            parent, last = name.rsplit(".", 1)
            setattr(sys.modules[parent], last, made)
    triton = sys.modules["triton"]
    triton.__version__ = "3.5.0"
    triton.jit = triton.constexpr_function = lambda kernel: kernel
    triton.autotune = triton.heuristics = lambda *_, **__: lambda kernel: kernel
    triton.Config = lambda *_, **__: None
    yield
    for name in names:
        del sys.modules[name]


def as_on_a_gpu(folder: Path) -> None:
    """Before Megatron is imported."""
    from megatron_patches import cuda_stand_in, reference_te

    cuda_stand_in.apply()
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(
        major=9, minor=0, multi_processor_count=132, name="H100", total_memory=80 << 30
    )
    reference_te.needed = lambda: False
    sys.path.insert(0, str(folder))
    for name in ("transformer_engine_torch", "transformer_engine.pytorch.onnx_extensions"):
        sys.modules[name] = Compiled(name)
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # its check of what is installed looks for the compiled part
    import transformer_engine.common

    transformer_engine.common.load_framework_extension = lambda framework: None
    with defined_kernels():
        import transformer_engine.pytorch
        import transformer_engine.pytorch.permutation


def main(folder: str, *overrides: str) -> None:
    if folder != "reference":
        as_on_a_gpu(Path(folder))
    import megatron_patches

    megatron_patches.activate()
    sys.path.insert(0, str(Path(__file__).parents[1] / "suite"))
    from on_meta import as_rank, build_on_meta

    from moerl.config.derive.model_configs import model_config
    from moerl.config.load import load

    if folder != "reference":
        torch.cuda.is_available = lambda: True
    config = load(overrides)
    layout = config.train.layout
    held = {}
    for stage in sorted({0, min(1, layout.pp - 1), layout.pp - 1}):
        with as_rank(stage * (layout.ranks // layout.pp), layout):
            built, owned = build_on_meta(model_config(config.model), config.train, max_context=config.model.max_context, expert_rank=0)
        held[stage] = {item.name: list(item.tensor.shape) for item in owned}
    import transformer_engine

    # What the configuration says after Megatron has checked it, which is what its layers are built from.
    fused = [field for field in FUSIONS if getattr(built.config, field)]
    print(json.dumps({"stages": held, "file": transformer_engine.__file__, "fused": fused, "words": built.config.fusions}))


if __name__ == "__main__":
    main(*sys.argv[1:])
