"""Doctor: whether the nodes can carry a run, found out before it starts (`moerl doctor`).

What is held against what was found is in checks/.
"""
