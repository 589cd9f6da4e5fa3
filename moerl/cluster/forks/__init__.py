"""Processes of a run on one host that begin as forks of one that has imported what they import: none imports torch for itself.

What they do afterwards is not known here.
"""
