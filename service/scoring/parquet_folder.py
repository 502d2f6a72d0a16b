"""ParquetFolder: the Parquet files of a folder, local or in an object store, and new files in it. A new file appears when it is complete.

A file that is written again is replaced, so a file can be written again after each crash.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from bertserve.service.errors import SettingsError, StartError, install_command
from bertserve.service.scoring.parquet import ParquetReader, ParquetWriter
from bertserve.service.scoring.part import ScoringProgress, sync_path
from bertserve.service.scoring.row import Place

try:
    import pyarrow as pa
    import pyarrow.fs as pafs
    import pyarrow.parquet as pq
except ImportError as missing:
    raise SettingsError(f"Parquet needs pyarrow, which is not installed; `{install_command('parquet')}` adds it.") from missing

SUFFIX = ".parquet"
REJECTED_SUFFIX = ".rejected.jsonl"
# Readers of a folder of Parquet files, such as Spark and pyarrow, skip names with these prefixes.
HIDDEN = (".", "_")
_MADE_SUFFIX = ".made"
_MADE = re.compile(rf"\..+\.[0-9a-f]{{32}}{re.escape(_MADE_SUFFIX)}", re.DOTALL)


@dataclass(frozen=True, slots=True)
class FileFacts:
    """A file in a listing: its size in bytes, and the time of its last change in nanoseconds by the clock of its file system."""

    size: int
    changed: int


class ParquetFolder:
    """A folder, by its path or URI. It can be pickled."""

    def __init__(self, uri: str, flag: str) -> None:
        """Creates it from a local path or a URI such as `s3://bucket/folder`, without access to the folder; `flag` names it in errors.

        Raises:
            SettingsError: pyarrow does not support the URI.
        """
        self.uri = uri
        try:
            filesystem, path = pafs.FileSystem.from_uri(uri if "://" in uri else os.path.abspath(uri))
        except (pa.ArrowException, OSError) as error:
            raise SettingsError(f"{flag} is `{uri}`, which pyarrow cannot open: {error}.") from error
        self.filesystem: Any = filesystem
        self.path: str = path.rstrip("/")

    def overlaps(self, other: ParquetFolder) -> bool:
        """Returns whether another folder is the same one, contains this one or is inside it, also through links."""
        first, second = f"{self._real_path()}/", f"{other._real_path()}/"
        return bool(self.filesystem == other.filesystem) and (first.startswith(second) or second.startswith(first))

    def _real_path(self) -> str:
        return os.path.realpath(self.path) if self.filesystem.type_name == "local" else self.path

    def files(self) -> dict[str, FileFacts]:
        """Returns all files within by name, including those in subfolders, sorted by name; empty if the folder does not exist.

        Raises:
            StartError: The folder cannot be listed, or is a file.
        """
        try:
            infos = self.filesystem.get_file_info(pafs.FileSelector(self.path, allow_not_found=True, recursive=True))
        except (pa.ArrowException, OSError) as error:
            raise StartError(f"the folder `{self.uri}` cannot be listed: {error}; give a folder of Parquet files.") from error
        paths = {
            info.path[len(self.path) + 1 :]: FileFacts(info.size, info.mtime_ns or 0) for info in infos if info.type == pafs.FileType.File
        }
        return dict(sorted(paths.items()))

    def parquet_files(self) -> dict[str, FileFacts]:
        """Returns its Parquet files by name; names that begin with `_` or `.` are skipped."""
        return {
            name: facts
            for name, facts in self.files().items()
            if name.endswith(SUFFIX) and not any(part.startswith(HIDDEN) for part in PurePosixPath(name).parts)
        }

    def facts(self, name: str) -> FileFacts:
        """Returns the properties of one of its files.

        Raises:
            StartError: They cannot be read.
        """
        try:
            info = self.filesystem.get_file_info(f"{self.path}/{name}")
        except (pa.ArrowException, OSError) as error:
            raise StartError(f"`{self.uri}/{name}` cannot be read: {error}.") from error
        return FileFacts(info.size or 0, info.mtime_ns or 0)

    def reader(self, name: str, inputs: Sequence[str]) -> ParquetReader:
        """Returns a reader at the start of one of its files, for a task that reads the columns `inputs`.

        Raises:
            StartError: It is not a Parquet file.
        """
        return ParquetReader(f"{self.path}/{name}", Place(), inputs=inputs, filesystem=self.filesystem)

    def read(self, name: str) -> bytes | None:
        """Returns the bytes of a file, or None if it does not exist."""
        try:
            with self.filesystem.open_input_stream(f"{self.path}/{name}") as stream:
                return bytes(stream.read())
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Writes a file.

        Raises:
            StartError: It cannot be written.
        """
        try:
            file = NewFile(self, name)
            file.stream.write(data)
            file.finish()
        except (pa.ArrowException, OSError) as error:
            raise StartError(f"`{self.uri}/{name}` cannot be written: {error}.") from error

    def remove(self, name: str) -> None:
        """Removes a file, if it exists."""
        with suppress(FileNotFoundError):
            self.filesystem.delete_file(f"{self.path}/{name}")

    def tidy(self) -> None:
        """Removes incomplete files of writers that died."""
        for name in self.files():
            if _MADE.fullmatch(PurePosixPath(name).name):
                self.remove(name)


class NewFile:
    """A file that is being written; it gets its name when it is complete."""

    def __init__(self, folder: ParquetFolder, name: str) -> None:
        """Opens the file."""
        self._filesystem, self._path = folder.filesystem, f"{folder.path}/{name}"
        parent, _, base = self._path.rpartition("/")
        # Each writer has its own temporary name, because a writer that seems dead may still write. This also applies to object stores, in
        # which objects appear when they are complete: pyarrow creates one from the written part if a stream is not closed.
        self._made = f"{parent}/.{base}.{uuid.uuid4().hex}{_MADE_SUFFIX}"
        self._filesystem.create_dir(parent, recursive=True)
        self._finished = False
        self.stream: Any = self._filesystem.open_output_stream(self._made)

    def finish(self) -> None:
        """Flushes the file to the disk and gives it its name."""
        self.stream.close()
        if self._filesystem.type_name == "local":
            sync_path(self._made)
        self._filesystem.move(self._made, self._path)
        self._finished = True

    def discard(self) -> None:
        """Removes the file, unless it has its name already."""
        if not self._finished:
            self.stream.close()
            self._filesystem.delete_file(self._made)


class ParquetOutput:
    """A Parquet file with predictions, and next to it a file with rejected rows, written by a run: a Sink."""

    def __init__(self, folder: ParquetFolder, name: str, writer: ParquetWriter) -> None:
        """Creates it; the files are opened for the first rows."""
        self._folder, self._name, self._rows = folder, name, writer
        self._file: NewFile | None = None
        self._rejected: NewFile | None = None
        self._parquet: Any = None
        self._schema: Any = None

    def append(self, data: bytes, rejected: bytes, progress: ScoringProgress) -> ScoringProgress:
        """Writes rows, given as bytes of an Arrow stream, and lines of rejected rows."""
        if data:
            head = b"" if self._schema is None else self._schema.serialize().to_pybytes()
            with pa.ipc.open_stream(head + data) as batches:
                writer = self._open(batches.schema)
                for batch in batches:
                    writer.write_batch(batch)
        if rejected:
            if self._rejected is None:
                self._rejected = NewFile(self._folder, self._name + REJECTED_SUFFIX)
            self._rejected.stream.write(rejected)
        return progress

    def _open(self, schema: Any) -> Any:
        if self._parquet is None:
            self._schema, self._file = schema, NewFile(self._folder, self._name)
            self._parquet = pq.ParquetWriter(self._file.stream, schema)
        return self._parquet

    def finish(self) -> None:
        """Gives both files their names, the predictions last, because that file marks the end of the work."""
        if self._parquet is None:
            table = self._rows.empty()
            self._open(table.schema).write_table(table)
        assert self._file is not None, "it is opened by now"
        self._parquet.close()
        if self._rejected is None:
            self._folder.remove(self._name + REJECTED_SUFFIX)  # of an earlier run
        else:
            self._rejected.finish()
        self._file.finish()

    def discard(self) -> None:
        """Removes the written files, unless they are finished."""
        if self._parquet is not None:
            with suppress(pa.ArrowException, OSError):  # the file is removed anyway
                self._parquet.close()
        for file in (self._file, self._rejected):
            if file is not None:
                file.discard()


def undone(source: Mapping[str, FileFacts], output: Mapping[str, FileFacts]) -> list[str]:
    """Returns the files without an output, or with one that is older than the file."""
    return [name for name, facts in source.items() if name not in output or output[name].changed < facts.changed]
