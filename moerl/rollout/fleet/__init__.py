"""Rollout servers together: which one gets a request, which of them serve, who receives what they answer.

One server is in rollout/server.
"""
