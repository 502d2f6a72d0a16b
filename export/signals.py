"""SIGINT and SIGTERM as an exception, so that what tidies up runs, and the few lines that they must not break into."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """A signal asked the command to end. No `Exception`: nothing but the command itself may take it for a failure.

    Attributes:
        signal: Which one.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)

    @property
    def exit_code(self) -> int:
        """The shell's convention: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + self.signal


@contextmanager
def stoppable() -> Iterator[None]:
    """Raises `Stopped` in the block on SIGINT and SIGTERM."""
    with _handled(_stop):
        yield


@contextmanager
def held_off() -> Iterator[None]:
    """Ignores SIGINT and SIGTERM in the block: for what takes no time and must not be left half done."""
    with _handled(signal.SIG_IGN):
        yield


def _stop(number: int, _: FrameType | None) -> None:
    raise Stopped(number)


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> Iterator[None]:
    """Gives both signals a handler in the block; outside of the main thread, where Python handles none, changes nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [(number, signal.signal(number, handler)) for number in STOPPING]
    try:
        yield
    finally:
        for number, handler_before in before:
            signal.signal(number, handler_before)
