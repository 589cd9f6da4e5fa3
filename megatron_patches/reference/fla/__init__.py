"""The part of flash-linear-attention that Megatron-Core 0.19 calls (megatron/core/ssm/gated_delta_net), in plain PyTorch.

Its kernels are Triton's. Found like the reference Transformer Engine (megatron_patches/reference_te.py), with which it lies.
"""
