"""Loads a checkpoint: a folder or hub id of a transformers model, of sentence-transformers or of a LoRA adapter, or a user's own module.

All functions raise CheckpointError if a part is missing, invalid or not supported; its message says which part and what to do.
"""
