"""Prepares a process before it loads models, under uvicorn or Ray: checks settings, keys and limits. Also sends messages to systemd."""

import os
import resource
import socket
import ssl
from contextlib import suppress
from importlib import import_module

from bertserve.service.auth import Authenticator
from bertserve.service.errors import SettingsError
from bertserve.service.settings import Settings, to_flag

# Open files: more than one process can serve as connections. Some systems allow a billion, and some libraries visit each possible number.
MAX_FILES = 2**16


def raise_file_limit() -> None:
    """Raises the limit on open files, which is 1024 by default: each connection needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))


def check_requirements(settings: Settings) -> None:
    """Checks what the settings require, as far as possible before models are loaded.

    Raises:
        SettingsError: Settings contradict each other, OpenTelemetry is not installed, or the certificate cannot be used.
    """
    _check_contradictions(settings)
    if settings.otlp_endpoint is not None:
        import_module("bertserve.service.tracing")  # fails without OpenTelemetry
    if settings.tls_cert is not None:
        load_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), settings)


def _check_contradictions(settings: Settings) -> None:
    for less, more in (("max_chars", "max_body_bytes"), ("timeout_ms", "max_timeout_ms")):
        if (value := getattr(settings, less)) > (limit := getattr(settings, more)):
            raise SettingsError(f"{to_flag(less)} is {value}, over {to_flag(more)}, which is {limit}; lower the first or raise the second.")
    if (settings.tls_cert is None) != (settings.tls_key is None):
        raise SettingsError("--tls-cert and --tls-key belong together; give both, or neither.")
    if settings.log_probes and not settings.access_log:
        raise SettingsError("--log-probes has no effect without --access-log; give that too.")
    need_keys = {
        "--no-public-health": not settings.public_health,
        "--no-public-metrics": not settings.public_metrics,
        "--max-concurrent-per-key": settings.max_concurrent_per_key is not None,
    }
    for flag, is_set in need_keys.items():
        if is_set and settings.api_key_file is None:
            raise SettingsError(f"{flag} has no effect without --api-key-file; give that too.")


def read_keys(settings: Settings) -> Authenticator:
    """Reads the files of keys.

    Raises:
        SettingsError: A file cannot be read, or contains no key or an invalid line.
    """
    return Authenticator(
        settings.api_key_file,
        admin_key_file=settings.admin_key_file,
        public_health=settings.public_health,
        public_metrics=settings.public_metrics,
    )


def load_certificate(context: ssl.SSLContext, settings: Settings) -> None:
    """Loads the certificate and its key for new connections.

    Raises:
        SettingsError: A file cannot be read, or the files do not belong together.
    """
    try:
        # without a password, OpenSSL would ask for one at the terminal
        context.load_cert_chain(settings.tls_cert or "", settings.tls_key, password="")
    except OSError as error:  # SSLError is a subclass
        raise SettingsError(
            f"--tls-cert `{settings.tls_cert}` and --tls-key `{settings.tls_key}` cannot be used ({error.strerror}); both must be PEM "
            "files, and the key must belong to the certificate and have no password."
        ) from error


def sd_notify(state: str) -> None:
    """Sends a state such as `READY=1` to systemd, if systemd started the service. `man sd_notify` describes the protocol."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
            systemd.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)  # @ is an abstract socket
