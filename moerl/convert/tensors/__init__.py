"""Tensors that are read in pieces, and files that are written whole or not at all.

Nothing here knows a checkpoint's names.
"""
