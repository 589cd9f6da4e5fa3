"""Models as checkpoints have them: files of Hugging Face folders, names and parts of tensors, FP8 blocks.

Declarations of families are in families/, what carries weights to Megatron in bridge/; the model a rank builds is in train/megatron.
"""
