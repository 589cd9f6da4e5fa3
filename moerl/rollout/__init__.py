"""Rollout: prompts in, scored groups out.

All servers together are in fleet/, one server in server/, the engines behind it in engines/, prompts in datasets/.
"""
