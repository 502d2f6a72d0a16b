"""Freed memory is returned to the system, with one call per interval for any number of requests."""

from __future__ import annotations

import threading
from collections.abc import Callable
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
