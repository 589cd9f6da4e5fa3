"""Checks of what was found on nodes and between them; a finding each.

How nodes are reached and measured is doctor's other files'.
"""
