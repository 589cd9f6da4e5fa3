"""Checkpoints of a run: directories, shards, saving beside training.

Conversions are in convert/.
"""
