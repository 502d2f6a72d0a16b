"""Errors that stop an export or a verification. Each message says what is wrong and what to do; each class has an exit code.

ExportError              1
├── CheckpointError      1  the checkpoint cannot be read, or is not supported
├── MissingPackageError  3  the checkpoint needs a package that is not installed
├── GraphError           1  a graph differs from what a stage expects, or cannot be created
├── ParityError          1  the bundle's answers differ from its checkpoint's
├── OutputExistsError    2  the target exists already
├── ExportRunningError   2  another process exports a bundle with this name
└── DataError            2  the data for a verification cannot be read
"""

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
    """A graph differs from what a stage expects, or cannot be created; the message says why and what to try."""


class ParityError(ExportError):
    """The bundle's answers differ from its checkpoint's; the message has the worst case."""


class OutputExistsError(ExportError):
    """The target exists and may not be replaced."""

    exit_code = 2


class ExportRunningError(ExportError):
    """Another process exports a bundle with this name into the same folder."""

    exit_code = 2


class DataError(ExportError):
    """The data for a verification cannot be read, or one of its lines is invalid."""

    exit_code = 2
