"""Turns SIGINT and SIGTERM into an exception, so that clean-up runs, and shields the few lines that they must not interrupt."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """A signal asked the command to end. It is no `Exception`, because only the command itself may catch it.

    Attributes:
        signal: The signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)

    @property
    def exit_code(self) -> int:
        """The shell's convention: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + self.signal


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """Raises `Stopped` in the block on SIGINT and SIGTERM."""
    with _handle_signals(_raise_stopped):
        yield


@contextmanager
def ignore_signals() -> Iterator[None]:
    """Ignores SIGINT and SIGTERM in the block, for work that takes no time and must not be left half done."""
    with _handle_signals(signal.SIG_IGN):
        yield


def _raise_stopped(number: int, _: FrameType | None) -> None:
    raise Stopped(number)


@contextmanager
def _handle_signals(handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> Iterator[None]:
    """Gives both signals a handler in the block. Outside of the main thread, where Python handles no signals, it changes nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = [(number, signal.signal(number, handler)) for number in STOP_SIGNALS]
    try:
        yield
    finally:
        for number, previous_handler in previous:
            signal.signal(number, previous_handler)
