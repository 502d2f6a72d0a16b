"""Reports the state of the service to systemd, for a unit of `Type=notify`. It does nothing if NOTIFY_SOCKET is not set."""

from __future__ import annotations

import logging
import time

from gunicorn.systemd import sd_notify

TICK_S = 0.5  # between two calls of `beat`
logger = logging.getLogger("bertserve.systemd")


def notify(state: str) -> None:
    """Sends a state such as `READY=1`."""
    sd_notify(state, logger)


def notify_reloading() -> None:
    """Tells systemd that the service reads its files again; `READY=1` must follow."""
    notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")


def beat() -> None:
    """Resets systemd's watchdog."""
    notify("WATCHDOG=1")
