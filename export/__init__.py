"""The export pipeline: converts a fine-tuned checkpoint to a bundle with a validation report. It needs the extra `export`."""
