"""Freed memory is returned to the system after work."""

from __future__ import annotations

import mmap
import threading
import time
from pathlib import Path

import pytest

from bertserve.service.engine import freed_memory
from bertserve.service.engine.freed_memory import WORK_S, FreedMemory


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


def work() -> None:
    end = time.process_time() + 2 * WORK_S
    while time.process_time() < end:
        pass


def test_freed_memory_leaves_the_process_after_work() -> None:
    """Glibc keeps a hole below an object in use, unless it is told to return it."""
    if freed_memory._malloc_trim is None:
        pytest.skip("needs glibc")
    memory = FreedMemory()
    objects = [bytes(1000) for _ in range(200_000)]
    last = bytes(1000)
    objects.clear()
    before, threads = resident_bytes(), set(threading.enumerate())
    work()
    memory.return_after_work()
    for thread in set(threading.enumerate()) - threads:
        thread.join()
    assert last
    assert before - resident_bytes() > 2**26
