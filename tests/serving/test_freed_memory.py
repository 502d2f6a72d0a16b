"""Freed memory is returned to the system, with one call per interval for any number of requests."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from bertserve.service.backend import freed_memory
from bertserve.service.backend.freed_memory import FreedMemory
from bertserve.service.serving import build
from bertserve.service.settings import Settings


def test_one_call_returns_the_memory_of_all_pending_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that arrive while a call is pending share it. A later request starts a new call."""
    returned: list[int] = []
    timers: list[Callable[[], None]] = []

    class Timer(threading.Timer):
        def start(self) -> None:
            timers.append(self.function)

    monkeypatch.setattr(freed_memory, "_malloc_trim", returned.append)
    monkeypatch.setattr(freed_memory, "threading", SimpleNamespace(Timer=Timer, Lock=threading.Lock))
    freed = FreedMemory()
    for _ in range(2):
        for _ in range(100):
            freed.return_soon()
        [timer] = timers
        timers.clear()
        timer()
    assert returned == [0, 0]


def test_memory_is_returned_after_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle process does not call `malloc_trim`."""
    work = iter([0.0, 0.1, 0.101, 0.149, 0.151, 0.16])
    monkeypatch.setattr(freed_memory, "time", SimpleNamespace(process_time=lambda: next(work)))
    freed, scheduled = FreedMemory(), []
    monkeypatch.setattr(freed, "return_soon", lambda: scheduled.append(True))
    counts = []
    for _ in range(5):
        freed.return_after_work()
        counts.append(len(scheduled))
    assert [1, 1, 1, 2, 2] == counts


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


@pytest.mark.parametrize("has_glibc", [True, False])
def test_the_number_of_heaps_is_limited_only_with_glibc(monkeypatch: pytest.MonkeyPatch, has_glibc: bool) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(freed_memory, "_mallopt", (lambda *arguments: calls.append(arguments)) if has_glibc else None)
    freed_memory.limit_heaps(4)
    assert calls == ([(-8, 6)] if has_glibc else [])


def test_the_service_limits_its_heaps_before_it_loads_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit applies only to threads that start later."""
    steps: list[str] = []

    def refuse(*arguments: object, **named: object) -> None:
        steps.append("metrics")
        raise RuntimeError

    monkeypatch.setattr(build, "limit_heaps", lambda threads: steps.append("heaps"))
    monkeypatch.setattr(build, "Metrics", refuse)
    with pytest.raises(RuntimeError):
        build.build(Settings())
    assert ["heaps", "metrics"] == steps
