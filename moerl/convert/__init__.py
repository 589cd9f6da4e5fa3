"""Conversions between checkpoints, as streams of tensors: `moerl convert`, `inspect`, `compare`.

Hugging Face folders are in hf/, checkpoints of runs in sharded/, tensors and files in tensors/.
"""
