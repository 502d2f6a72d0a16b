"""The export pipeline: a fine-tuned checkpoint to a bundle with evidence. Needs the `export` extra (torch, transformers)."""
