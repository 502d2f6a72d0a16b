"""Checks of a finished bundle: `verify` has their order.

`checkpoint_checks` and `remeasure` compare with the checkpoint and need torch. The other modules need none, so that they run where the
service does.
"""
