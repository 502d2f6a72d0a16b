"""The hidden folder that an export works in, beside its output."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from export.signals import held_off


@contextmanager
def workspace(name: str, output: Path) -> Iterator[Path]:
    """Makes a hidden folder on the output's file system, and removes it whatever happens.

    Args:
        name: Name of the bundle that is made.
        output: The models folder.
    """
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=output))
    try:
        yield scratch
    finally:
        with held_off():
            shutil.rmtree(scratch, ignore_errors=True)
