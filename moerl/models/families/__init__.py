"""Model families, one declarative file each, and their table. Imports neither torch nor Megatron.

What is common to all architectures lives here too; how tensors move does not (models/bridge).
"""
