"""Hugging Face folders as source and target of a conversion.

Checkpoints of runs are in convert/sharded.
"""
