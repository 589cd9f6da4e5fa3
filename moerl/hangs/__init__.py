"""Hangs: what every process does, who did not arrive, and the report of it.

What a run does about it is in the driver (run.py, publish.py).
"""
