"""The classes of Transformer Engine that Megatron-Core's layer specs name, in plain PyTorch.

Same constructor arguments, parameter names and partition attributes as Transformer Engine, so that checkpoints and the
bridge see one naming on CPU and GPU. FP8 is emulated. What it lacks (sliding windows, FP8 parameters, fused te.ops) raises.
"""

__version__ = "2.3.0"  # what Megatron's version gates see: the first with block scaling; later ones open options not implemented here

from transformer_engine import common, pytorch

__all__ = ["common", "pytorch"]
