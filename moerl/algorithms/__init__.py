"""Algorithms: which groups to keep, what credit a sample gets, what a token costs. One file each, and a row in algorithm_table.

Nothing here masks, sums or scales a loss (train/loss).
"""
