"""Part: an output that is being written, and how far it is, so that a run that was killed at any moment goes on where it was.

`OUTPUT.part` only grows. `OUTPUT.state` says how many bytes of it count, and is replaced whole, after these are on the disk. What stands
behind them is cut off by the next run. Knows no rows.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from service.errors import SettingsError, StartError
from service.scoring.row import Place

_HEAD_BYTES = 2**20
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is.

    Attributes:
        place: What of the input is done.
        rejected: Rows without an answer.
        warned: Rows with a warning.
        output_bytes: Bytes of the part that count.
        rejected_bytes: Bytes of the file of rejected rows that count.
        complete: Whether the part is whole, and only has to get its name.
    """

    place: Place = field(default_factory=Place)
    rejected: int = 0
    warned: int = 0
    output_bytes: int = 0
    rejected_bytes: int = 0
    complete: bool = False


def identity_of(path: Path) -> dict[str, Any]:
    """Returns what a file is known by: its size, the time of its last change, and a digest of its first mebibyte.

    Raises:
        StartError: It cannot be read.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            head = hashlib.sha256(file.read(_HEAD_BYTES)).hexdigest()
    except OSError as error:
        raise StartError(f"the input `{path}` cannot be read ({error.strerror}).") from error
    return {"bytes": status.st_size, "changed_ns": status.st_mtime_ns, "sha256_of_head": head}


class Part:
    """The files of a run that can go on."""

    def __init__(self, output: Path, rejected: Path, facts: Mapping[str, Any]) -> None:
        """Creates it; `open` opens it.

        Args:
            output: What the output is called when it is whole.
            rejected: The file of rejected rows.
            facts: What the bytes of the output depend on, by name. A run goes on only where they are the same.
        """
        self.path = output.with_name(output.name + ".part")
        self._output, self._rejected_path, self._facts = output, rejected, json.loads(json.dumps(facts))
        self._state = output.with_name(output.name + ".state")
        self._file: io.FileIO | None = None
        self._rejected: io.FileIO | None = None
        self._locked = False

    def open(self, *, restart: bool) -> Progress:
        """Opens the part, and returns how far it is.

        Args:
            restart: Whether to begin again, whatever is there.

        Raises:
            SettingsError: The output is there already, or model, options or input are not those that the part was begun with.
            StartError: Another run writes it, or it is broken, or cannot be written.
        """
        try:
            self._file = file = self.path.open("ab+", buffering=0)
            return self._open(file, restart)
        except OSError as error:
            self.close()
            raise StartError(f"`{error.filename or self.path}` cannot be written ({error.strerror}).") from error
        except StartError:
            self.close()
            raise

    def _open(self, file: io.FileIO, restart: bool) -> Progress:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartError(f"another run writes `{self.path}`; wait for it, or choose another output.") from None
        self._locked = True
        if restart:
            self._state.unlink(missing_ok=True)
        progress = self._read_state() or Progress()
        if self.is_named(progress):
            return progress
        if self._output.exists() and not restart and not self._state.exists():
            raise SettingsError(f"`{self._output}` exists already; give --restart to score again, or choose another output.")
        self._rejected = rejected = self._rejected_path.open("ab", buffering=0)
        for each, size in ((file, progress.output_bytes), (rejected, progress.rejected_bytes)):
            if os.fstat(each.fileno()).st_size < size:
                raise StartError(f"`{each.name!s}` is shorter than `{self._state}` says; give --restart to score again.")
            os.ftruncate(each.fileno(), size)
        return progress

    def is_named(self, progress: Progress) -> bool:
        """Returns whether the whole part has got its name already, and only what is beside it is left."""
        return progress.complete and self._output.exists() and self.path.stat().st_size == 0 < progress.output_bytes

    def _read_state(self) -> Progress | None:
        try:
            state = json.loads(self._state.read_bytes())
            known, given = state["facts"], state["progress"]
            progress = Progress(**given | {"place": Place(**given["place"])})
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise StartError(f"`{self._state}` is not what this version writes; give --restart to score again.") from error
        if differs := [name for name in {**known, **self._facts} if known.get(name) != self._facts.get(name)]:
            raise SettingsError(
                f"`{self.path}` was begun with another {', '.join(differs)}; score with the same again to go on, or give --restart to begin "
                "from the first row."
            )
        return progress

    def head(self) -> bytes:
        """Returns the beginning of what counts."""
        with self.path.open("rb") as file:
            return file.read(_HEAD_BYTES)

    def append(self, data: bytes, rejected: bytes, progress: Progress) -> Progress:
        """Writes bytes behind those that count, and then says that they count; returns the progress with the new sizes.

        Raises:
            OSError: They cannot be written, as where the disk is full. What counted before still does.
        """
        for file, added in ((self._file, data), (self._rejected, rejected)):
            if added and file is not None:
                _write(file, added)
                os.fsync(file.fileno())
        progress = replace(progress, output_bytes=progress.output_bytes + len(data), rejected_bytes=progress.rejected_bytes + len(rejected))
        self._write_state(progress)
        return progress

    def finish(self, progress: Progress, make: Callable[[Path, Path], None] | None) -> None:
        """Gives the whole part its name.

        Args:
            progress: How far it is.
            make: Makes the output of the part, where it is not the output itself.

        Raises:
            OSError: It cannot be written.
        """
        self._write_state(replace(progress, complete=True))
        if make is None:
            os.replace(self.path, self._output)
        else:
            made = self._output.with_name(self._output.name + ".made")
            make(self.path, made)
            with made.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(made, self._output)
        self.tidy(progress)

    def tidy(self, progress: Progress) -> None:
        """Removes what only a run that goes on needs."""
        _sync_folder(self._output)
        if not progress.rejected:
            self._rejected_path.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)
        self._state.unlink(missing_ok=True)

    def close(self) -> None:
        """Closes the files; those of which nothing counts go."""
        for file in (self._file, self._rejected):
            if file is not None:
                file.close()
        if self._locked and self.path.exists() and not self._state.exists():
            self.path.unlink()
            if self._rejected is not None:
                self._rejected_path.unlink(missing_ok=True)

    def _write_state(self, progress: Progress) -> None:
        made = self._state.with_name(self._state.name + ".made")
        with made.open("w", encoding="utf-8") as file:
            json.dump({"format": FORMAT, "facts": self._facts, "progress": asdict(progress)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(made, self._state)
        _sync_folder(self._state)


def _write(file: io.FileIO, data: bytes) -> None:
    left = memoryview(data)
    while left:  # an unbuffered file may take less than all
        left = left[file.write(left) :]


def _sync_folder(path: Path) -> None:
    """Brings the names in a file's folder to the disk."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
