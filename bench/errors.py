"""The errors that end a command before it has measured anything. The message is one sentence for the user."""

from __future__ import annotations


class BenchError(Exception):
    """The command cannot be run as given: a flag, a file or an address is wrong. Exit code 2."""


class MissingExtraError(BenchError):
    """A package that an optional part needs is not installed. Exit code 3."""
