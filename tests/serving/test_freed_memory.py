"""Freed memory returns to the system, with one call per interval for any number of requests."""

from __future__ import annotations

import threading

import pytest

from bertserve.service.backend import freed_memory
from bertserve.service.backend.freed_memory import FreedMemory


def test_memory_is_returned_at_once_and_then_once_for_all_that_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that arrive while a call is pending share it; a call always follows the last request."""
    returned = threading.Semaphore(0)
    monkeypatch.setattr(freed_memory, "_malloc_trim", lambda pad: returned.release())
    monkeypatch.setattr(freed_memory, "RETURN_S", 0.5)
    freed = FreedMemory()
    freed.return_soon()
    assert returned.acquire(timeout=20)
    for _ in range(100):
        freed.return_soon()
    assert not returned.acquire(blocking=False)
    assert returned.acquire(timeout=20)
    assert not returned.acquire(timeout=0.6)


def test_without_glibc_nothing_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other systems lack the function."""
    monkeypatch.setattr(freed_memory, "_malloc_trim", None)
    before = threading.active_count()
    FreedMemory().return_soon()
    assert before == threading.active_count()
