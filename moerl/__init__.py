"""Reinforcement learning for large mixture-of-experts language models, Megatron-first."""

__version__ = "0.1.0"
