"""Jobs of Slurm: their script, and each node from its first process to its last.

What runs on the nodes is run.py's.
"""
