"""Rollout server that runs vLLM; `python -m moerl.rollout.vllm.server` in vLLM's environment."""
