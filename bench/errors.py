"""Errors that end a command before it has measured anything. The message is a sentence for the user."""

from __future__ import annotations


class BenchError(Exception):
    """The command cannot run: a flag, a file or an address is wrong. Exit code 2."""
