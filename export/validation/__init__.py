"""Validates that a graph agrees with its checkpoint: `measure` creates the validation report for the manifest.

`measure`, `parity` and `reference` compare with the checkpoint and need torch. `bertserve.export.verify` uses the other modules without a
checkpoint, so these do not need it.
"""
