"""Algorithms: which groups to keep, what credit a token gets, what it costs, and what corrects a server's other probabilities.

Nothing here masks, sums or scales a loss (train/loss).
"""
