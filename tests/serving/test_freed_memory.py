"""Freed memory is returned to the system after work."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from pathlib import Path

import pytest

from bertserve.service.engine import freed_memory


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


def test_freed_memory_leaves_the_process_after_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Glibc keeps a hole below an object in use, unless it is told to return it."""
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("needs glibc")
    monkeypatch.setattr(freed_memory, "INTERVAL_S", 0.01)
    monkeypatch.setattr(freed_memory, "WORK_S", 0.0)
    objects = [bytes(1000) for _ in range(200_000)]
    last = bytes(1000)
    objects.clear()
    before, stopped = resident_bytes(), threading.Event()
    thread = threading.Thread(target=freed_memory.return_freed_memory, args=(stopped,))
    thread.start()
    end = time.monotonic() + 10
    while before - resident_bytes() < 2**26 and time.monotonic() < end:
        time.sleep(0.01)
    stopped.set()
    thread.join()
    assert last
    assert before - resident_bytes() > 2**26
