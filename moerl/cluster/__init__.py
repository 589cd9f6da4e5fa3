"""Processes of a run on its nodes: where they are placed, how they end, Ray's of one host.

Jobs of Slurm are in slurm/, processes that do not answer in hangs/.
"""
