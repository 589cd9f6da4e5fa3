"""Engines behind a rollout server: hf in hf/, SGLang, vLLM, and a fake without a model; and what starts them.

The states of a server are not theirs (rollout/server).
"""
