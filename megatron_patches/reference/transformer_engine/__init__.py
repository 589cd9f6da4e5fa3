"""The classes of Transformer Engine that Megatron-Core's layer specs name, in plain PyTorch.

Same constructor arguments, parameter names and partition attributes as Transformer Engine, so that checkpoints and the
bridge see one naming on CPU and GPU. What it lacks (FP8, context parallelism, sliding windows, fused te.ops) raises.
"""

__version__ = "2.2.0"  # what Megatron's version gates see; below 2.3 no option appears that is not implemented here

from transformer_engine import common, pytorch

__all__ = ["common", "pytorch"]
