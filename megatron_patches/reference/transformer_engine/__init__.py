"""The classes of Transformer Engine that Megatron-Core's layer specs name, in plain PyTorch.

Same constructor arguments, parameter names and partition attributes as Transformer Engine, so that checkpoints and the
bridge see one naming on CPU and GPU. FP8 is emulated: operands are cast to real FP8 and back, products are computed in float32.
What it lacks (FP8 parameters, FP8 attention, overlapped communication, fused te.ops) raises.
"""

from transformer_engine import common, pytorch

__version__ = "2.8.0"
"""What Megatron's version gates see. Blockwise scaling needs 2.3, recomputation of single modules under FP8 2.6, sinks 2.8
(megatron/core/fp8_utils.py, transformer_config.py, extensions/transformer_engine.py). They also open options of the layers
(delay_wgrad_compute, symmetric_ar_type), which their constructors refuse, fused routers (pytorch/router.py), FP4, and an import of
what is not here (cpu_offload), which Megatron does without."""

__all__ = ["common", "pytorch"]
