"""Settings with their defaults and descriptions, a file per section.

No rule between two settings lives here (rules/).
"""
