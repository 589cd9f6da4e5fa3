"""`moerl doctor`: whether the nodes can carry a run, found out before it starts.

    head (moerl doctor) -- a store on one port -- one node process per node, and per GPU a rank that they start

facts.py gathers what one node is, checks*.py judge facts without looking at any machine, exchange.py measures links between ranks,
judge.py names slow nodes and pairs, head.py and node.py run both, output.py prints.
"""
