"""Rollout server that runs SGLang; `python -m moerl.rollout.sglang.server` in SGLang's environment."""
