"""Training: the group of ranks seen from the driver, and the engine that each rank runs (megatron_engine.py: its verbs; step.py: passes).

Megatron's parts are in megatron/, micro-batches in batching/, where memory is in memory/, checkpoints in checkpoint/, what a rank sends in
push/.
"""
