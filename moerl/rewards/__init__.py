"""Rewards: verifiers, and the pool of killable processes that runs them.

What becomes of a score is the algorithm's.
"""
