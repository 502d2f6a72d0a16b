"""Errors that stop a command. Each message says what is wrong and what to do; each class has an exit code."""

import sys
from pathlib import Path


class ExportError(Exception):
    """A checkpoint, graph or calibration cannot be used, or answers differ too much; `UsageError` has the other exit codes.

    Attributes:
        exit_code: Exit code of a command that the error stops.
    """

    exit_code = 1


class UsageError(ExportError):
    """The target must not be replaced, or texts or labeled data cannot be used; with exit code 3, a package is not installed."""

    def __init__(self, message: str, *, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def log(message: object) -> None:
    """Prints a line about the command to stderr."""
    print(f"bert-export: {message}", file=sys.stderr, flush=True)


def warn(message: str) -> None:
    """Prints a warning to stderr."""
    log(f"WARNING: {message}")


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, with the next one after a colon; the name of its class without a message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def report_error(error: Exception, folder: Path) -> int:
    """Prints the error that stopped a command, which uses files of a folder; returns the exit code."""
    message = str(error)
    if isinstance(error, OSError):
        where = error.filename or folder  # the error of a failed write, for example on a full disk, does not name its file
        message = f"a file cannot be read or written: {error.strerror or error} (`{where}`); check it, and the free disk space."
    log(message)
    return error.exit_code if isinstance(error, ExportError) else 1
