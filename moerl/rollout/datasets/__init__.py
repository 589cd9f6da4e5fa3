"""Data sets: files in verl's schema, reasoning-gym tasks, tiny tasks. One class each, and a row in load_dataset.

Their order in a run is rollout/prompts.py's.
"""
