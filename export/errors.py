"""What can stop an export or a verification. Each message says what was wrong and what to do; each class has its exit code.

ExportError              1
├── CheckpointError      1  the checkpoint cannot be read, or is not understood
├── MissingPackageError  3  the checkpoint needs a package that is not installed
├── GraphError           1  a graph is not what a stage expected it to be, or cannot be made
├── ParityError          1  the bundle does not answer as the checkpoint does
├── OutputExistsError    2  there is a bundle of that name already
├── ExportRunningError   2  another process exports a bundle of that name
└── DataError            2  the data to verify a bundle on cannot be read
"""

from typing import ClassVar


class ExportError(Exception):
    """Root of the tree.

    Attributes:
        exit_code: Exit code of a command that it stops.
    """

    exit_code: ClassVar[int] = 1


class CheckpointError(ExportError):
    """The checkpoint cannot be read, or something in it is not understood."""


class MissingPackageError(ExportError):
    """The checkpoint needs a package that is not installed; the message says what to install."""

    exit_code = 3


class GraphError(ExportError):
    """A graph is not what a stage expected it to be, or cannot be made; the message says why and what to try."""


class ParityError(ExportError):
    """The bundle does not answer as the checkpoint does; the message holds the worst case."""


class OutputExistsError(ExportError):
    """A bundle of that name exists and may not be overwritten."""

    exit_code = 2


class ExportRunningError(ExportError):
    """Another process exports a bundle of that name into that folder."""

    exit_code = 2


class DataError(ExportError):
    """The data to verify a bundle on cannot be read, or a line of it is not understood."""

    exit_code = 2
