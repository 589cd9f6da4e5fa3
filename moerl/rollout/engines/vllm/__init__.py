"""vLLM behind a rollout server; `python -m moerl.rollout.engines.vllm.vllm_server` in vLLM's environment.

The states of the server are rollout/server's.
"""
