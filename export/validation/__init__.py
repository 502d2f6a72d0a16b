"""Compares the graphs of a bundle with its checkpoint: at export, and again by `bert-export verify`.

`comparison` is the comparison, with its bounds; the others supply requests, answers and references. `pytorch` and `report`
need torch, so `verify` imports `pytorch` only for a checkpoint.
"""
