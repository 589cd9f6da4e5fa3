"""Rules between settings: each broken one is a `Problem` with its reason and what to write instead.

Nothing is computed here that a run needs (derive/).
"""
