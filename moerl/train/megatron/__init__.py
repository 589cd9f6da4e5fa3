"""Megatron-Core as a rank builds it: model, routers, optimizer, process groups.

The passes over it are train/step.py's.
"""
