"""Convert checkpoints as streams of tensors: Hugging Face, FP8 blocks, and the sharded checkpoints of training runs.

source (HFSource, ShardedSource) -> Entry: name, dtype, shape, how to read it piece by piece
    -> FileJob: one file, so many bytes, how to write it -> write_files: parallel, resumable, verified, visible at once
"""
