"""Needs of a run, computed before anything is allocated (`moerl plan`).

The plan that a push executes is in weights/plan.
"""
