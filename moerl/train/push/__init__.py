"""Trainer's side of a push: which pieces a rank has, by Hugging Face names.

The push itself is in weights/.
"""
