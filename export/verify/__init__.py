"""Checks of a finished bundle; `verify` runs them in order.

`checkpoint_checks` compares with the checkpoint and needs torch. The other modules do not need it, so they run in the service's
environment.
"""
