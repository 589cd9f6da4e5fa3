"""Values that follow from settings and from a model's config.json: shapes, cuts, places.

No rule lives here (rules/), and nothing that starts anything.
"""
