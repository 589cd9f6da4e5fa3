"""Hangs: what every process does, who did not arrive, and the report of it.

They are noticed where somebody waits: for ranks in train/rank_calls.py, for servers in rollout/fleet/fleet.py, for pushes in
weights/push_calls.py.
"""
