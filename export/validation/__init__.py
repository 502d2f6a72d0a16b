"""Compares the graphs of a bundle with its checkpoint: at export, and again by `bert-export verify`.

Only `reference` and `checkpoint_check` need torch.
"""
