"""Plan of a push, before any byte moves: tensors, parts, senders, buckets, rounds. Pure.

Nothing is sent here (weights/transport).
"""
