"""The command `bert-serve serve`: it binds the socket, starts one process or several workers, and reports when the service is ready.

The parent of workers does not import onnxruntime, whose threads do not survive a fork. Therefore `server`, which needs it, is imported
only in the process that loads models.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable
from functools import partial

from bertserve.service import __version__
from bertserve.service.api.auth import Authenticator
from bertserve.service.api_keys import ApiKeys
from bertserve.service.errors import SettingsError, StartError, plural
from bertserve.service.server import logs, systemd
from bertserve.service.settings import Settings
from bertserve.service.tracing.trace import tracer_class

logger = logging.getLogger("bertserve")


def serve(settings: Settings, with_sources: Callable[[Settings], Settings]) -> None:
    """Serves until a signal stops it; `with_sources` adds the folders of the bundles that `--model` names to the settings.

    Raises:
        StartError: The service cannot start with these settings.
    """
    start = time.perf_counter()
    logs.configure_logging(settings.log_format)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # it waits until models are loaded
    auth = prepare(settings)
    if auth.keys is None and settings.host not in ("127.0.0.1", "::1", "localhost"):
        logger.warning(
            "LISTENING ON %s WITHOUT AN API KEY: anyone who reaches this address can use the service. "
            "Set --api-key-file, or listen on 127.0.0.1 behind a proxy.",
            settings.host,
        )
    with socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host, settings.port))  # before the models are loaded, so that a port in use is reported at once
        except OSError as error:
            reason = f"cannot listen on {settings.host}:{settings.port} ({error.strerror})"
            raise StartError(f"{reason}; choose another --host or --port.") from error
        settings = with_sources(settings)  # once, and before workers exist
        on_ready = partial(_announce, settings, listener, start)
        if settings.workers > 1:
            from bertserve.service.server.workers import work_together

            work_together(settings, listener, auth, on_ready)
            code = 0
        else:
            from bertserve.service.server.server import work

            code = work(settings, listener, auth, on_ready)
    sys.stdout.flush()
    os._exit(code)  # native code of a daemon thread that returns to a finished interpreter would abort the process


def prepare(settings: Settings) -> Authenticator:
    """Makes all checks that are possible before models are loaded, and reads the keys.

    Raises:
        SettingsError: The service cannot start with these settings.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))
    if settings.otlp_endpoint is not None:
        tracer_class()
    if settings.tls_cert is not None:
        try:
            # without a password, OpenSSL would ask for one at the terminal
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert, settings.tls_key, password="")
        except OSError as error:  # SSLError is a subclass
            raise SettingsError(
                f"--tls-cert `{settings.tls_cert}` and --tls-key `{settings.tls_key}` cannot be used ({error.strerror}); both must be PEM "
                "files, and the key must belong to the certificate and have no password."
            ) from error
    return Authenticator(
        None if settings.api_key_file is None else ApiKeys(settings.api_key_file),
        admin_keys=None if settings.admin_key_file is None else ApiKeys(settings.admin_key_file, flag="--admin-key-file"),
        public_health=settings.public_health,
        public_metrics=settings.public_metrics,
    )


def _announce(settings: Settings, listener: socket.socket, start: float, started: tuple[list[str], int]) -> None:
    """Prints the served models and the address, and notifies systemd."""
    models, threads = started
    host, port = listener.getsockname()[:2]
    address = f"{'http' if settings.tls_cert is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}"
    seconds = time.perf_counter() - start
    chosen = plural(threads, "inference thread") + (f" in {settings.workers} workers" if settings.workers > 1 else "")
    for model in models:
        print(f"  {model}")
    print(f"bertserve {__version__} listens on {address}, ready after {seconds:.2f} s with {chosen}; docs at {address}/docs", flush=True)
    systemd.notify(f"READY=1\nSTATUS=listens on {address}")
