"""ParquetFolder: the Parquet files of a folder, here or in an object store, and the files that are made in one. Each appears when it is whole.

Who writes a file again replaces it, so that a file may be made as often as its maker dies.
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
from bertserve.service.scoring.part import Progress
from bertserve.service.scoring.row import Place

try:
    import pyarrow as pa
    import pyarrow.fs as pafs
    import pyarrow.parquet as pq
except ImportError as missing:
    raise SettingsError(f"Parquet needs pyarrow, which is not installed; `{install_command('parquet')}` adds it.") from missing

SUFFIX = ".parquet"
REJECTED_SUFFIX = ".rejected.jsonl"
# Readers of a folder of Parquet files, such as Spark and pyarrow, skip names with this prefix.
HIDDEN = (".", "_")
_MADE_SUFFIX = ".made"
_MADE = re.compile(rf"\..+\.[0-9a-f]{{32}}{re.escape(_MADE_SUFFIX)}", re.DOTALL)


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What a listing says of a file.

    Attributes:
        size: In bytes.
        changed: When it was changed last, in nanoseconds, by the clock of where it is.
    """

    size: int
    changed: int


class ParquetFolder:
    """A folder, by its path or its URI. It may be pickled."""

    def __init__(self, uri: str, flag: str) -> None:
        """Creates it; nothing is looked at.

        Args:
            uri: A path of this machine, or a URI such as `s3://bucket/folder`.
            flag: What errors call it.

        Raises:
            SettingsError: There is no such kind of place.
        """
        self.uri = uri
        try:
            filesystem, path = pafs.FileSystem.from_uri(uri if "://" in uri else os.path.abspath(uri))
        except (pa.ArrowException, OSError) as error:
            raise SettingsError(f"{flag} is `{uri}`, which pyarrow cannot open: {error}.") from error
        self.filesystem: Any = filesystem
        self.path: str = path.rstrip("/")

    def overlaps(self, other: ParquetFolder) -> bool:
        """Returns whether it is another folder, within it or around it, also through links."""
        first, second = f"{self._real_path()}/", f"{other._real_path()}/"
        return bool(self.filesystem == other.filesystem) and (first.startswith(second) or second.startswith(first))

    def _real_path(self) -> str:
        return os.path.realpath(self.path) if self.filesystem.type_name == "local" else self.path

    def files(self) -> dict[str, FileFacts]:
        """Returns the files within by name, those of folders within it too, in the order of their names; none where there is no folder.

        Raises:
            StartError: It cannot be listed, or is a file.
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
        """Returns those of its files that are Parquet by their names; what begins with `_` or `.` is none."""
        return {
            name: facts
            for name, facts in self.files().items()
            if name.endswith(SUFFIX) and not any(part.startswith(HIDDEN) for part in PurePosixPath(name).parts)
        }

    def reader(self, name: str, inputs: Sequence[str]) -> ParquetReader:
        """Returns a reader of one of its files, at its beginning, for a task that reads such columns.

        Raises:
            StartError: It is no Parquet file.
        """
        return ParquetReader(f"{self.path}/{name}", Place(), inputs=inputs, filesystem=self.filesystem)

    def read(self, name: str) -> bytes | None:
        """Returns the bytes of a file, or None where there is none."""
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
        """Removes a file, if it is there."""
        with suppress(FileNotFoundError):
            self.filesystem.delete_file(f"{self.path}/{name}")

    def tidy(self) -> None:
        """Removes what was being written when its writer died."""
        for name in self.files():
            if _MADE.fullmatch(PurePosixPath(name).name):
                self.remove(name)


class NewFile:
    """A file that is being written; it gets its name when it is whole."""

    def __init__(self, folder: ParquetFolder, name: str) -> None:
        """Opens it."""
        self._filesystem, self._path = folder.filesystem, f"{folder.path}/{name}"
        parent, _, base = self._path.rpartition("/")
        # A name of its own: a maker that was thought dead may still write. In an object store too, though objects appear when they are
        # whole there: pyarrow makes one of what was written when a stream goes unclosed.
        self._made = f"{parent}/.{base}.{uuid.uuid4().hex}{_MADE_SUFFIX}"
        self._filesystem.create_dir(parent, recursive=True)
        self._finished = False
        self.stream: Any = self._filesystem.open_output_stream(self._made)

    def finish(self) -> None:
        """Brings it to the disk and gives it its name."""
        self.stream.close()
        if self._filesystem.type_name == "local":
            file = os.open(self._made, os.O_RDONLY)
            try:
                os.fsync(file)
            finally:
                os.close(file)
        self._filesystem.move(self._made, self._path)
        self._finished = True

    def discard(self) -> None:
        """Removes it, if it has no name yet."""
        if not self._finished:
            self.stream.close()
            self._filesystem.delete_file(self._made)


class ParquetOutput:
    """A Parquet file with predictions, and next to it its rejected rows, as a run writes them: a Sink."""

    def __init__(self, folder: ParquetFolder, name: str, writer: ParquetWriter) -> None:
        """Creates it; the first rows open it."""
        self._folder, self._name, self._rows = folder, name, writer
        self._file: NewFile | None = None
        self._rejected: NewFile | None = None
        self._parquet: Any = None
        self._schema: Any = None

    def append(self, data: bytes, rejected: bytes, progress: Progress) -> Progress:
        """Writes rows, which come as bytes of an Arrow stream, and lines of rejected rows."""
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
        """Gives both files their names, the one with predictions last: it says that all is done."""
        if self._parquet is None:
            table = self._rows.empty()
            self._open(table.schema).write_table(table)
        assert self._file is not None, "it is opened by now"
        self._parquet.close()
        if self._rejected is None:
            self._folder.remove(self._name + REJECTED_SUFFIX)  # of another run
        else:
            self._rejected.finish()
        self._file.finish()

    def discard(self) -> None:
        """Removes what was written, where it is not finished."""
        for file in (self._file, self._rejected):
            if file is not None:
                file.discard()


def undone(source: Mapping[str, FileFacts], output: Mapping[str, FileFacts]) -> list[str]:
    """Returns the files that have no output, or one that is older than they are."""
    return [name for name, facts in source.items() if name not in output or output[name].changed < facts.changed]
