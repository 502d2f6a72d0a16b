"""PartialOutput: an output that is being written, with its progress, so that an interrupted run can continue from any point.

`OUTPUT.part` only grows. `OUTPUT.state` has the number of its bytes that count, and is replaced as a whole, after these bytes are on the
disk. The next run cuts off all bytes after them. The state is written before the first byte of the part, so a part without a state is not
from a run, and stays unchanged. This module does not read rows.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import IO, Any

from bertserve.service.errors import SettingsError, StartError
from bertserve.service.scoring.row import Place

_HEAD_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class ScoringProgress:
    """The progress of a run.

    Attributes:
        place: The end of the finished input.
        rejected: Rows without an answer.
        warned: Rows with a warning.
        output_bytes: Number of bytes of the part that count.
        rejected_bytes: Number of bytes of the file of rejected rows that count.
        complete: Whether the part is complete, and only needs its name.
    """

    place: Place = field(default_factory=Place)
    rejected: int = 0
    warned: int = 0
    output_bytes: int = 0
    rejected_bytes: int = 0
    complete: bool = False


def identity_of(path: Path) -> dict[str, Any]:
    """Returns the properties that identify a file: its size, the time of its last change, and a digest of its first mebibyte.

    Raises:
        SettingsError: It is a pipe or a device.
        StartError: It cannot be read.
    """
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):  # to open a pipe waits, and to read it takes its rows away
            raise SettingsError(f"the input `{path}` is not a regular file; give `-` to read from stdin.")
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            head = hashlib.sha256(file.read(_HEAD_BYTES)).hexdigest()
    except OSError as error:
        raise StartError(f"the input `{path}` cannot be read ({error.strerror}).") from error
    return {"bytes": status.st_size, "changed_ns": status.st_mtime_ns, "sha256_of_head": head}


class PartialOutput:
    """The files of a run that can continue."""

    def __init__(self, output: Path, rejected: Path, facts: Mapping[str, Any]) -> None:
        """Creates it; `open` opens it.

        `facts` has everything that affects the bytes of the output, by name. A run continues only if these facts are equal.
        """
        self.path = output.with_name(output.name + ".part")
        self._output, self._rejected_path, self._facts = output, rejected, json.loads(json.dumps(facts))
        self._state = output.with_name(output.name + ".state")
        self._made, self._made_state = (path.with_name(path.name + ".made") for path in (output, self._state))
        self._file: io.FileIO | None = None
        self._rejected: io.FileIO | None = None
        self._begun = self._created = False  # whether this run wrote the files, or created the empty part, and may remove them
        self._progress = ScoringProgress()
        self._replaces: dict[str, int] | None = None  # the output's identity when the part was started
        self._writing = threading.Lock()

    def files(self) -> dict[str, Path]:
        """Returns the path of each of its files, by description."""
        paths = (self.path, self._state, self._made, self._made_state)
        return {"the output": self._output, "--rejected": self._rejected_path} | {f"the run's own file {path.name}": path for path in paths}

    def open(self, *, restart: bool) -> ScoringProgress:
        """Opens the part, and returns its progress; `restart` starts from the beginning, even if files exist.

        Raises:
            SettingsError: A file exists that is not from this run, or model, options or input differ from those at the start of the
                part.
            StartError: Another run is writing it, or it is broken or cannot be written.
        """
        try:
            for path, flag in ((self._output, "output"), (self._rejected_path, "--rejected")):
                _refuse_special(path, flag=flag)
            was_there = os.path.lexists(self.path)
            self._file = file = self.path.open("ab+", buffering=0)
            self._lock(file)
            self._created = not was_there
            return self._open(file, restart)
        except OSError as error:
            self.close()
            raise StartError(f"`{error.filename or self.path}` cannot be written ({error.strerror}).") from error
        except BaseException:  # Ctrl-C must not leave empty files either
            self.close()
            raise

    def _lock(self, file: io.FileIO) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartError(f"another run is writing `{self.path}`; wait for it, or choose another output.") from None

    def _open(self, file: io.FileIO, restart: bool) -> ScoringProgress:
        progress = None if restart else self._read_state()
        if progress is None:
            progress = self._begin(file, restart)
        elif self.is_named(progress):
            return progress
        else:
            self._check_output(progress)
        self._begun = True
        self._rejected = rejected = self._rejected_path.open("ab", buffering=0)
        for target, size in ((file, progress.output_bytes), (rejected, progress.rejected_bytes)):
            if os.fstat(target.fileno()).st_size < size:
                raise StartError(f"`{target.name!s}` is shorter than `{self._state}` says; give --restart to score again.")
            os.ftruncate(target.fileno(), size)
        return progress

    def _check_output(self, progress: ScoringProgress) -> None:
        """Refuses an output that another program has written meanwhile; a complete one may have its name already."""
        if not progress.complete and self._replaces != _identity(self._output):
            raise SettingsError(
                f"`{self._output}` was written after `{self.path}` was started; move it, and run the command without --restart to continue."
            )

    def _begin(self, file: io.FileIO, restart: bool) -> ScoringProgress:
        """Writes the state of a run without rows, unless a file of another run exists."""
        if not restart:
            if os.fstat(file.fileno()).st_size:
                refuse_existing(self.path, flag="output")
            refuse_existing(self._output, flag="output")
            refuse_existing(self._rejected_path, flag="--rejected")
            refuse_existing(self._made, flag="output")
        self._begun, self._replaces = True, _identity(self._output)
        self._write_state(ScoringProgress())
        return ScoringProgress()

    def is_named(self, progress: ScoringProgress) -> bool:
        """Returns whether the complete part already has its name, so that only the other files are left."""
        return progress.complete and self._output.exists() and self.path.stat().st_size == 0 < progress.output_bytes

    def _read_state(self) -> ScoringProgress | None:
        try:
            state = json.loads(self._state.read_bytes())
            facts, fields = state["facts"], state["progress"]
            progress = self._progress = ScoringProgress(**fields | {"place": Place(**fields["place"])})
            self._replaces = state.get("replaces")
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise StartError(f"`{self._state}` was not written by this version; give --restart to score again.") from error
        if differs := [name for name in {**facts, **self._facts} if facts.get(name) != self._facts.get(name)]:
            raise SettingsError(
                f"`{self.path}` was started with different {', '.join(differs)}; use the same again to continue, or "
                "give --restart to start from the first row."
            )
        return progress

    def append(self, data: bytes, rejected: bytes, progress: ScoringProgress) -> ScoringProgress:
        """Appends bytes, then records that they count; returns the progress with the new sizes.

        Raises:
            OSError: The bytes cannot be written, for example because the disk is full. Earlier bytes still count.
        """
        with self._writing:
            for file, added in ((self._file, data), (self._rejected, rejected)):
                if file is None:
                    raise OSError(errno.EBADF, "the run was stopped")
                if added:
                    write_all(file, added)
                    os.fsync(file.fileno())
            progress = replace(
                progress, output_bytes=progress.output_bytes + len(data), rejected_bytes=progress.rejected_bytes + len(rejected)
            )
            self._write_state(progress)
            return progress

    def finish(self, progress: ScoringProgress, make: Callable[[Path, Path], None] | None) -> None:
        """Gives the complete part its name; `make` writes the output from the part, if it has another format.

        Raises:
            OSError: It cannot be written.
            SettingsError: Another program has written a file with this name meanwhile.
            StartError: No row has an answer, and the output would replace a file.
        """
        self._check_output(progress)
        rows = progress.place.row
        if self._replaces is not None and self._replaces["bytes"] and 0 < rows == progress.rejected:
            raise StartError(
                f"all rows were rejected (`{self._rejected_path}` says why), so `{self._output}` was not replaced; "
                "fix the input or the flags, and start again with --restart."
            )
        self._write_state(replace(progress, complete=True))
        if make is None:
            os.replace(self.path, self._output)
        else:
            make(self.path, self._made)
            sync_path(self._made)
            os.replace(self._made, self._output)
        self.tidy(progress)

    def tidy(self, progress: ScoringProgress) -> None:
        """Removes the files that only a continued run needs."""
        sync_path(self._output.parent)
        with suppress(FileNotFoundError):
            if not progress.rejected and self._rejected_path.stat().st_size == 0:
                self._rejected_path.unlink()
        self.path.unlink(missing_ok=True)
        self._state.unlink(missing_ok=True)

    def close(self) -> None:
        """Closes the files after pending writes, and removes files without bytes that count."""
        with self._writing:
            for file in (self._file, self._rejected):
                if file is not None:
                    file.close()
            if self._begun and self._progress == ScoringProgress():
                for path in (self.path, self._state, self._made_state, *([] if self._rejected is None else [self._rejected_path])):
                    path.unlink(missing_ok=True)
            elif self._created and not self._begun:
                self.path.unlink(missing_ok=True)
            self._file = self._rejected = None
            self._begun = self._created = False

    def _write_state(self, progress: ScoringProgress) -> None:
        with self._made_state.open("w", encoding="utf-8") as file:
            state = {"facts": self._facts, "progress": asdict(progress), "replaces": self._replaces}
            json.dump(state, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(self._made_state, self._state)
        self._progress = progress
        sync_path(self._state.parent)


def write_all(file: io.FileIO, data: bytes) -> None:
    """Writes bytes to an unbuffered file."""
    rest = memoryview(data)
    while rest:  # an unbuffered file may accept only a part
        rest = rest[file.write(rest) :]


def sync_path(path: str | Path) -> None:
    """Flushes a file, or the names in a folder, to the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _identity(path: Path) -> dict[str, int] | None:
    """Returns properties that distinguish a file from another one with the same name; None if it does not exist."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return {"inode": status.st_ino, "bytes": status.st_size, "changed_ns": status.st_mtime_ns}


def check_distinct(files: Mapping[str, Path]) -> None:
    """Checks that no two paths, given by description, are the same file, directly or through links; the files need not exist.

    Raises:
        SettingsError: Two paths are the same file.
    """
    for (first, path), (second, other) in combinations(files.items(), 2):
        if os.path.realpath(path) == os.path.realpath(other) or _is_same_file(path, other):
            raise SettingsError(f"{second} is the same file as {first} (`{other}`); give another name.")


def check_stream(stream: IO[Any], files: Mapping[str, Path]) -> None:
    """Checks that stdout is not redirected to one of the files, whose paths are given by description.

    Raises:
        SettingsError: It is.
    """
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):  # the stream is closed, or not a file
        return
    for name, path in files.items():
        if os.path.isfile(path) and os.path.samestat(status, path.stat()):
            raise SettingsError(f"stdout is {name} (`{path}`); redirect it to another file.")


def refuse_existing(path: Path, *, flag: str) -> None:
    """Refuses a file that exists, for a run without permission to replace it; a dangling link counts as a file.

    Raises:
        SettingsError: It exists.
    """
    if os.path.lexists(path):
        raise SettingsError(f"`{path}` exists already; give --restart to replace it, or choose another {flag}.")


def _refuse_special(path: Path, *, flag: str) -> None:
    """Refuses an existing path that is not a regular file: a run would replace or remove a device, and would fail on a folder at its end.

    Raises:
        SettingsError: It is not a regular file.
    """
    if path.exists() and not path.is_file():
        raise SettingsError(f"`{path}` is not a regular file; choose another {flag}.")


def _is_same_file(first: Path, second: Path) -> bool:
    try:
        return first.samefile(second)
    except OSError:
        return False
