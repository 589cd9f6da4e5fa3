"""SGLang behind a rollout server; `python -m moerl.rollout.engines.sglang.sglang_server` in SGLang's environment.

The states of the server are rollout/server's.
"""
