"""Evaluation: samples of fixed prompts, scored, and what follows from them. One implementation for `moerl eval` and for a run's own."""
