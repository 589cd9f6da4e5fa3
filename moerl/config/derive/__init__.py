"""Values that follow from settings and from a model's config.json: shapes, cuts, places.

Rules are in rules/; but what cannot be derived says why (gpu_map.py: too few GPUs), and a rule hands that on. Nothing starts anything.
"""
