"""Losses and log-probs of a micro-batch: masked, summed and scaled here and nowhere else; and what is not a number.

What one token costs is the algorithm's.
"""
