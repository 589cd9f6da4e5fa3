"""The embedded rollout engine: a transformers model behind HTTP, in its own process (`python -m moerl.rollout.hf`). CPU only."""
