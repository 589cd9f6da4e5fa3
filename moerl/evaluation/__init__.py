"""Evaluation: samples of fixed prompts, scored, and what follows from them; one implementation for `moerl eval` and for runs.

Servers and rewards are those of the run.
"""
