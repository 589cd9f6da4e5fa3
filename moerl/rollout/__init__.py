"""Rollout: prompts in, scored groups out. Engines, the pool over them, the buffer to the trainer."""
