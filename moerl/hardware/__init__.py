"""Hardware of a node as its tools and files tell it, and the network settings that follow.

Whether it will do is doctor's.
"""
