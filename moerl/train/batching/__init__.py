"""Micro-batches: which sequence goes where, and its way into a row and back. numpy, no torch.

What is computed on them is train/step.py's.
"""
