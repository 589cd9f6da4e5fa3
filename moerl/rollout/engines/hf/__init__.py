"""Embedded engine: a transformers model in its own process (`python -m moerl.rollout.engines.hf`).

HTTP and requests are rollout/server's.
"""

from moerl.models.transformers_table import keep_table

keep_table()  # here: what follows imports transformers
