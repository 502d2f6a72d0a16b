"""The export pipeline: a fine-tuned checkpoint to a bundle with a validation report. Needs the `export` extra (torch, transformers)."""
