"""Digests of tensors, and what is said of a push that disagrees.

The bytes come from weights/weight_session.py.
"""
