"""Ways of a bucket: shared memory, GPU memory, a network, files; and how the sides of a push find each other.

What is in a bucket is the plan's (weights/plan).
"""
