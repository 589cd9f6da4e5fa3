"""Embedded engine: a transformers model in its own process (`python -m moerl.rollout.engines.hf`).

HTTP and requests are rollout/server's.
"""
