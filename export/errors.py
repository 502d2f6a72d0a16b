"""What can stop an export. Each message says what was wrong and what to do; `export/cli.py` maps classes to exit codes.

ExportError
├── CheckpointError      the checkpoint cannot be read, or is not understood
├── MissingPackageError  the checkpoint needs a package that is not installed
├── GraphError           a graph is not what a stage expected it to be
├── ParityError          the bundle does not answer as the checkpoint does
├── OutputExistsError    there is a bundle of that name already
└── DataError            the data to verify a bundle on cannot be read
"""


class ExportError(Exception):
    """Root of the tree."""


class CheckpointError(ExportError):
    """The checkpoint cannot be read, or something in it is not understood."""


class MissingPackageError(ExportError):
    """The checkpoint needs a package that is not installed; the message says what to install."""


class GraphError(ExportError):
    """A graph is not what a stage expected it to be."""


class ParityError(ExportError):
    """The bundle does not answer as the checkpoint does; the message holds the worst case."""


class OutputExistsError(ExportError):
    """A bundle of that name exists and may not be overwritten."""


class DataError(ExportError):
    """The data to verify a bundle on cannot be read, or a line of it is not understood."""
