"""What ends a command before it has measured anything: one exception, its message a sentence for the person at the keyboard."""

from __future__ import annotations


class BenchError(Exception):
    """The command cannot be run as it was given: a wrong flag, file or address. Exit code 2."""


class MissingExtraError(BenchError):
    """A package that an optional part needs is not installed. Exit code 3."""
