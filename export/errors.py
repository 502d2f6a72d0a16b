"""Errors that stop a command. Each message says what is wrong and what to do; each class has an exit code."""

import sys
from pathlib import Path
from typing import ClassVar


class ExportError(Exception):
    """Base class of all errors.

    Attributes:
        exit_code: Exit code of a command that the error stops.
    """

    exit_code: ClassVar[int] = 1


class CheckpointError(ExportError):
    """The checkpoint cannot be read, or a part of it is not supported."""


class MissingPackageError(ExportError):
    """The checkpoint needs a package that is not installed; the message says what to install."""

    exit_code = 3


class GraphError(ExportError):
    """A graph cannot be created, or its answers differ from its checkpoint's; the message says why, or has the worst case."""


class OutputError(ExportError):
    """The target exists and may not be replaced, or another export writes it."""

    exit_code = 2


class DataError(ExportError):
    """The texts or labeled data for an export, a verification or a calibration cannot be used, or a line of them is invalid."""

    exit_code = 2


def report_error(error: Exception, folder: Path) -> int:
    """Prints the error that stopped a command, which uses files of a folder; returns the exit code."""
    message = str(error)
    if isinstance(error, OSError):
        where = error.filename or folder  # the error of a failed write, for example on a full disk, does not name its file
        message = (
            f"a file cannot be read or written: {error.strerror or error} (`{where}`); check it, and the free disk space. No partial "
            "files are left."
        )
    print(f"bert-export: {message}", file=sys.stderr, flush=True)
    return error.exit_code if isinstance(error, ExportError) else 1
