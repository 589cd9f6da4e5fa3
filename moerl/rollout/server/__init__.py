"""One rollout server: its contract, its states, what goes over HTTP, and its process as the driver sees it.

What samples is in rollout/engines.
"""
