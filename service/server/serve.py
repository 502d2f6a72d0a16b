"""The command `bert-serve serve`: it binds the socket, starts one process or several workers, and reports when the service is ready.

The parent of workers does not import onnxruntime, whose threads do not survive a fork. Therefore `work`, which needs it, is imported
only in the process that loads models.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from bertserve.service import __version__
from bertserve.service.errors import plural
from bertserve.service.server import logs, systemd
from bertserve.service.server.preparation import prepare
from bertserve.service.server.server import bind
from bertserve.service.settings import Settings

logger = logging.getLogger("bertserve")


def serve(settings: Settings, with_sources: Callable[[Settings], Settings]) -> None:
    """Serves until a signal stops it; `with_sources` adds the folders of the bundles that `--model` names to the settings.

    Raises:
        StartError: The service cannot start with these settings.
    """
    start = time.perf_counter()
    logs.configure_logging(settings.log_format)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # it waits until models are loaded
    secrets = prepare(settings)
    if secrets.keys is None and not _is_loopback(settings.host):
        logger.warning(
            "LISTENING ON %s WITHOUT AN API KEY: anyone who reaches this address can use the service. "
            "Set --api-key-file, or listen on 127.0.0.1 behind a proxy.",
            settings.host,
        )
    # bound before the models are loaded, so that a port in use is reported at once
    with bind(settings.host, settings.port) as listener:
        settings = with_sources(settings)  # once, and before workers exist

        def on_ready(started: tuple[str, list[str], int]) -> None:
            _announce(settings, *started, time.perf_counter() - start)

        if settings.workers > 1:
            from bertserve.service.server.workers import work_together

            work_together(settings, listener, secrets, on_ready)
        else:
            from bertserve.service.server.work import work

            work(settings, listener, secrets, on_ready)
    if any(thread.daemon for thread in threading.enumerate()):
        # the process would not wait for it, and native code that returns to a finished interpreter aborts the process
        sys.stdout.flush()
        os._exit(0)


def _announce(settings: Settings, address: str, models: list[str], threads: int, seconds: float) -> None:
    """Prints the served models and the address, and notifies systemd."""
    chosen = plural(threads, "inference thread") + (f" in {settings.workers} workers" if settings.workers > 1 else "")
    ready = f"bertserve {__version__} listens on {address}, ready after {seconds:.2f} s with {chosen}; docs at {address}/docs"
    for model in models:
        print(logs.as_printed(f"  {model}", settings.log_format))
    print(logs.as_printed(ready, settings.log_format, address=address, ready_s=round(seconds, 2), threads=threads), flush=True)
    systemd.notify(f"READY=1\nSTATUS=listens on {address}")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
