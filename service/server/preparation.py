"""Reads and checks everything that a start needs before it loads models: key files, the certificate and the limit of descriptors."""

from __future__ import annotations

import resource
import ssl
from typing import NamedTuple

from bertserve.service.api_keys import ApiKeys
from bertserve.service.errors import SettingsError
from bertserve.service.settings import Settings
from bertserve.service.tracing.trace import tracer_class


class Keys(NamedTuple):
    """The key files of callers and of admins. Without the first, all callers are admitted; without the second, requests change no models."""

    callers: ApiKeys | None
    admins: ApiKeys | None

    def reload(self) -> None:
        """Reads the files again; after an error in a file, it logs the error and keeps the old keys."""
        for keys in self:
            if keys is not None:
                keys.reload()


def prepare(settings: Settings) -> Keys:
    """Makes all checks that are possible before models are loaded, and returns the keys.

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
    return Keys(
        None if settings.api_key_file is None else ApiKeys(settings.api_key_file),
        None if settings.admin_key_file is None else ApiKeys(settings.admin_key_file, flag="--admin-key-file"),
    )
