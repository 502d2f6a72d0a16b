"""Reads and checks everything that a start needs before it loads models: key files, the certificate and the limit of descriptors."""

from __future__ import annotations

import logging
import os
import resource
import ssl
from dataclasses import dataclass
from pathlib import Path

from bertserve.service.api_keys import ApiKeys
from bertserve.service.errors import SettingsError
from bertserve.service.settings import Settings
from bertserve.service.tracing.trace import tracer_class

logger = logging.getLogger("bertserve.tls")
SECRET_LOGS = ("bertserve.keys", "bertserve.tls")  # the loggers of `Secrets`


class Certificate:
    """A certificate chain with its key, as files; `context` is for new connections, and requires TLS 1.2 or later."""

    def __init__(self, chain: Path, key: Path) -> None:
        """Reads the PEM files: the certificate with its intermediate certificates, and its private key without a password.

        Raises:
            SettingsError: A file cannot be read, or the files do not belong together.
        """
        self._chain = chain
        self._key = key
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._load()

    def reload(self) -> None:
        """Reads the files again, for new connections; after an error it logs the error and keeps the current certificate."""
        try:
            Certificate(self._chain, self._key)  # a failed load into the current context could leave it with only one of the files
            self._load()
        except SettingsError as error:
            logger.error("the current certificate stays: %s", error)
        else:
            logger.info("reloaded the certificate")

    def _load(self) -> None:
        try:
            self.context.load_cert_chain(self._chain, self._key, password=lambda: "")  # otherwise OpenSSL asks at the terminal
        except OSError as error:  # SSLError is a subclass
            reason = getattr(error, "reason", None) or error.strerror or type(error).__name__
            raise SettingsError(
                f"--tls-cert `{self._chain}` and --tls-key `{self._key}` cannot be used ({reason}); both must be PEM "
                "files, and the key must belong to the certificate and have no password."
            ) from error


MOST_RAISED = 65536


@dataclass(frozen=True)
class Secrets:
    """The keys of callers and the certificate of the service. SIGHUP reads them again.

    Attributes:
        keys: Keys of callers; None admits all callers.
        admin_keys: Keys that can change models; None disables model management.
        certificate: The certificate for TLS; None for plain HTTP.
    """

    keys: ApiKeys | None
    admin_keys: ApiKeys | None
    certificate: Certificate | None

    @classmethod
    def read(cls, settings: Settings) -> Secrets:
        """Reads the files that the settings name.

        Raises:
            SettingsError: A file cannot be read, or its content is invalid.
        """
        keys = None if settings.api_key_file is None else ApiKeys(settings.api_key_file)
        admin_keys = None if settings.admin_key_file is None else ApiKeys(settings.admin_key_file, flag="--admin-key-file")
        certificate = None if settings.tls_cert is None or settings.tls_key is None else Certificate(settings.tls_cert, settings.tls_key)
        return cls(keys, admin_keys, certificate)

    def reload(self) -> None:
        """Reads all files again; after an error in a file, it logs the error and keeps the old value."""
        for secret in (self.keys, self.admin_keys, self.certificate):
            if secret is not None:
                secret.reload()


def prepare(settings: Settings) -> Secrets:
    """Reads keys and certificate, and makes all other checks that are possible before models are loaded.

    Raises:
        SettingsError: The service cannot start with these settings.
    """
    raise_limit()
    if settings.otlp_endpoint is not None:
        tracer_class()
    if settings.workers > 1 and not hasattr(os, "fork"):
        raise SettingsError(
            f"--workers is {settings.workers}, but this system cannot fork processes; set it to 1, and start several services."
        )
    return Secrets.read(settings)


def raise_limit() -> None:
    """Raises the limit of open file descriptors, as far as the process may and needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MOST_RAISED if hard == resource.RLIM_INFINITY else min(hard, MOST_RAISED)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
