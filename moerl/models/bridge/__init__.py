"""Bridges between a Megatron model spread over ranks and Hugging Face names: the native one, and adapters of other packages'.

The rules they walk are in models/families.
"""
