"""Traces of a run: metrics, sample dumps, the terminal, the log, the HTML report, and first-step guards.

What is measured comes from its owners.
"""
