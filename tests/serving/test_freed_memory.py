"""Freed memory is returned to the system, with one call per interval for any number of requests."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path

import pytest

from bertserve.service.backend import freed_memory
from bertserve.service.backend.freed_memory import FreedMemory


def test_freed_memory_leaves_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Glibc keeps a hole below an object in use, unless it is told to return it."""
    if freed_memory._malloc_trim is None:
        pytest.skip("needs glibc")
    monkeypatch.setattr(freed_memory, "RETURN_S", 0)
    objects = [bytes(1000) for _ in range(200_000)]
    last = bytes(1000)
    objects.clear()
    before = resident_bytes()
    FreedMemory().return_soon()
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()
    assert last
    assert before - resident_bytes() > 2**26


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


def test_without_glibc_nothing_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freed_memory, "_malloc_trim", None)
    before = threading.active_count()
    FreedMemory().return_soon()
    assert before == threading.active_count()
