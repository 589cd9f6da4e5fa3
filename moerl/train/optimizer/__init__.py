"""Optimizer of a rank: Megatron's distributed Adam, Muon in its step, and the learning rate of a step.

When it steps is train/step.py's, what of it lies where train/memory's.
"""
