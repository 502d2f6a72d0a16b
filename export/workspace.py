"""The hidden folder in which an export works, the bundle's move from it to its place, and the signals that can stop an export.

A bundle exists either completely or not at all. The hidden folder is next to the bundle, and its lock allows one export per name.

The lock ends with the process, even if it is killed. The next export with this name then reuses the folder and empties it. SIGINT and
SIGTERM raise an exception, so that clean-up runs; the few lines that must not be interrupted ignore them.
"""

import fcntl
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any

from bertserve.export.errors import UsageError
from bertserve.service.bundle.files import CARD_FILE, MANIFEST_FILE, TOKENIZER_FILE

LOCK_FILE = "export.lock"
# the hidden ones are from a killed `verify --update`, or from a file manager
_BUNDLE_FILES = {MANIFEST_FILE, TOKENIZER_FILE, CARD_FILE, f".{MANIFEST_FILE}", f".{CARD_FILE}", ".DS_Store"}


def raise_interrupt(number: int, _: FrameType | None) -> None:
    """Handles a signal by KeyboardInterrupt with the signal's number."""
    raise KeyboardInterrupt(number)


def ignore_signals() -> AbstractContextManager[None]:
    """Ignores SIGINT and SIGTERM in the block, for short work that must be completed."""
    return handle_signals(signal.SIG_IGN)


@contextmanager
def handle_signals(handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> Iterator[None]:
    """Sets a handler of SIGINT and SIGTERM in the block. Outside the main thread, where Python handles no signals, it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = [(number, signal.signal(number, handler)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield
    finally:
        for number, previous_handler in previous:
            signal.signal(number, previous_handler)


@contextmanager
def workspace(name: str, output: Path, *, overwrite: bool) -> Iterator[Path]:
    """Creates a hidden folder in the models folder, which is created if it does not exist, and removes the hidden folder at the end.

    Raises:
        UsageError: The bundle exists and must not be replaced, another process exports one with this name into this folder, or the hidden
            folder is a link, whose target is not the exporter's to empty.
    """
    is_new = not output.exists()
    output.mkdir(parents=True, exist_ok=True)
    folder = output / f".{name}.export"
    if folder.is_symlink():
        raise UsageError(f"`{folder}`, in which the export works, is a link; remove it, or choose another --output.")
    lock = _lock(folder)
    if lock is None:
        folder = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=output))
    try:
        with ignore_signals():
            _empty(folder)  # removes files of a killed export
        _refuse_existing(output / name, overwrite=overwrite)
        yield folder
    finally:
        with ignore_signals():
            _empty(folder)
            _unlock(folder, lock)
            if is_new:
                with suppress(OSError):  # not empty: it contains the bundle
                    output.rmdir()


def _lock(folder: Path) -> IO[str] | None:
    """Creates a folder with a locked file in it, and returns the file; None on a file system without locks."""
    path = folder / LOCK_FILE
    while True:
        folder.mkdir(exist_ok=True)
        try:
            file = path.open("a+", encoding="ascii")
        except FileNotFoundError:  # another export has just ended and removed the folder
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            with file:
                raise UsageError(
                    f"another export into `{folder.with_name(folder.name[1 : -len('.export')])}` is running (process "
                    f"{file.read().strip()}); wait for it, or choose another --output."
                ) from error
        except OSError:
            file.close()
            _unlock(folder, None)
            return None
        with suppress(FileNotFoundError):
            # another export can have removed its file at its end, after this one opened it
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                file.truncate(0)
                print(os.getpid(), file=file, flush=True)
                return file
        file.close()


def _unlock(folder: Path, lock: IO[str] | None) -> None:
    """Removes an empty folder with its lock."""
    (folder / LOCK_FILE).unlink(missing_ok=True)
    with suppress(OSError):  # the next export has just created its lock in it
        folder.rmdir()
    if lock is not None:
        lock.close()


def _empty(folder: Path) -> None:
    for path in folder.glob("*/"):
        shutil.rmtree(path, ignore_errors=True)


def _refuse_existing(target: Path, *, overwrite: bool) -> None:
    """Refuses an existing target, before minutes of work. A folder with other files than a bundle's is never replaced."""
    if not os.path.lexists(target):
        return
    files = sorted(target.iterdir()) if target.is_dir() and not target.is_symlink() else []
    is_bundle = any(file.name == MANIFEST_FILE for file in files)
    for file in files:
        is_known = file.name in _BUNDLE_FILES or file.name.endswith((".onnx", ".onnx.data", ".svg"))
        if not is_bundle or not is_known or file.is_dir():
            raise UsageError(f"`{target}` exists with `{file.name}`, which is not part of a bundle; move it, or choose another --output.")
    if not overwrite:
        raise UsageError(f"`{target}` exists; choose another --output, or give --overwrite to replace it.")


def package_bundle(folder: Path, target: Path, texts: Mapping[str, str], *, overwrite: bool) -> None:
    """Adds manifest and card to the bundle in `folder`, which is on the target's file system, and renames it to `target`.

    An existing bundle, file or link at the target is renamed first and deleted last.

    Raises:
        UsageError: Without file locks, another export has created the target.
    """
    _refuse_existing(target, overwrite=overwrite)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    folder.chmod(0o755)  # tempfile creates it as private, but another user can run the service
    aside = target.with_name(f".{target.name}.old")
    with ignore_signals():
        try:
            if os.path.lexists(target):
                _remove(aside)
                target.rename(aside)
            folder.rename(target)
        except BaseException:  # after any failure, the old bundle is restored
            if os.path.lexists(aside) and not os.path.lexists(target):
                aside.rename(target)
            raise
        with suppress(OSError):  # the new bundle is in place; remains of the old one are hidden, and the next export removes them
            _remove(aside)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
