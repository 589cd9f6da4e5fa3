"""Memory of a rank: in which state it is where, and how it leaves the device and comes back.

Who may have the GPUs is residency.py's.
"""
