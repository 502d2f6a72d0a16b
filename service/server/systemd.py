"""Reports the state of the service to systemd, for a unit of `Type=notify`. It does nothing if NOTIFY_SOCKET is not set."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress

SOCKET, WATCHDOG_TIMEOUT, WATCHDOG_PROCESS = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"


def notify(state: str) -> None:
    """Sends a state such as `READY=1`, as sd_notify(3) does."""
    address = os.environ.get(SOCKET)
    if not address:
        return
    if address.startswith("@"):  # an abstract socket
        address = f"\0{address[1:]}"
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.connect(address)
        sender.send(state.encode())


def notify_reloading() -> None:
    """Tells systemd that the service reads its files again; `READY=1` must follow."""
    notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")


class SystemdWatchdog:
    """Sends WATCHDOG=1 twice per WatchdogSec= of the unit, as long as `beat` is called."""

    def __init__(self) -> None:
        """Reads the interval of the unit."""
        timeout, process = os.environ.get(WATCHDOG_TIMEOUT, ""), os.environ.get(WATCHDOG_PROCESS, "")
        is_meant = timeout.isdecimal() and process in ("", str(os.getpid()))
        self._interval_s = int(timeout) / 2e6 if is_meant else None
        self._next = 0.0

    def beat(self) -> None:
        """Sends WATCHDOG=1 if it is due."""
        if self._interval_s is not None and (now := time.monotonic()) >= self._next:
            self._next = now + self._interval_s
            notify("WATCHDOG=1")
