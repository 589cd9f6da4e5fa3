"""Checkpoints of runs as source and target of a conversion, without ranks.

Hugging Face folders are in convert/hf.
"""
