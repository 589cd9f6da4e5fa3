"""Rewards: verifiers (one file each, listed in table.py) and the pool of killable processes that runs them."""
