"""Validation that a graph answers as its checkpoint does: `measure` collects it for the manifest.

`measure`, `parity` and `reference` compare with the checkpoint and need torch. `bertserve.export.verify` uses the other modules without a
checkpoint, so that they need none.
"""
