"""Checks of a finished bundle: `verify` has their order.

`checkpoint_checks` compares with the checkpoint and needs torch. The other modules need none, so that they run where the service does.
"""
